"""Write the folder of a request: weights, patches, settings, log, and last the receipt and the ledger."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge.editing.patches import Patch
from expunge.outcome import Outcome
from expunge.requests import folder as names
from expunge.requests.commitments import Opening
from expunge.requests.folder import State
from expunge.requests.ledger import LEDGER, Entry, head, written
from expunge.requests.measuring import MeanLoss
from expunge.requests.prepared import Prepared
from expunge.requests.receipt import RECEIPT, Receipt, this_code
from expunge.requests.settings import described
from expunge.requests.signing import sign
from expunge.requests.sources import method_file
from expunge.requests.weights import file_digest, save_weights, shared_names, weights_of
from expunge.storage.codec import encode
from expunge.storage.documents import parse_json
from expunge.storage.files import write_bytes, write_json
from expunge.storage.folders import signature


@dataclass(frozen=True)
class Made:
    """What was made of a request, for whoever examines it before the receipt is written."""

    prepared: Prepared
    outcome: Outcome
    weights_before: str
    weights_after: str
    losses: Mapping[str, MeanLoss]  # where there are no labels, and so no accuracies
    say: Callable[[str], None] = lambda line: None  # tells a line, which the log keeps
    work: Path | None = None
    """A private folder for parts of an examination that take long: it outlives a kill, and is removed at the end."""


Examine = Callable[[Made, Path], Mapping[str, Any]]  # writes files into the folder, returns what the receipt says of them


def write_folder(new: Path, made: Made, lines: Sequence[str], examine: Examine | None, key: str | os.PathLike[str] | None) -> Receipt:
    """All files of the folder; the receipt and the ledger last."""
    prepared, outcome, earlier = made.prepared, made.outcome, made.prepared.earlier
    shared, device, threads = shared_names(outcome.model), prepared.device, prepared.settings.threads or torch.get_num_threads()
    assert outcome.patch is not None
    save_weights(new / names.WEIGHTS, weights_of(outcome.model, prepared.stored), shared)
    _persistent(outcome.patch, outcome.model).save(new / names.PATCH)
    if outcome.edit is not None:
        outcome.edit.save(new / names.EDIT)
    settings = encode(replace(prepared.settings, threads=threads, device=str(device))) | {
        "built": described(prepared.method),
        "used": outcome.method if isinstance(outcome.method, str) else repr(outcome.method),
        "choice": encode(outcome.choice),
    }
    write_json(new / names.SETTINGS, settings)
    opening = Opening.new(prepared.new)
    openings = (*((earlier.openings or ()) if earlier is not None else ()), opening)
    write_bytes(new / names.OPENINGS, names.write_openings(openings))
    os.chmod(new / names.OPENINGS, 0o600)
    ledger = _kept(earlier, new)
    measured = measures(made)
    if examine is not None:
        measured |= dict(examine(made, new))
    data = {"train": prepared.task.data, "test": prepared.task.test_data}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_bytes(new / names.LOG, "".join(f"{line}\n" for line in (*lines, f"{now} ended")).encode(errors="replace"))
    write_json(new / names.RESULT, signature(names.COMMAND, [*os.listdir(new), RECEIPT, LEDGER, names.SIGNATURE]))
    receipt = Receipt(
        number=len(ledger) + 1,
        time=now,
        weights_before=made.weights_before,
        weights_after=made.weights_after,
        forget=len(prepared.new),
        commitments=opening.root(),
        forgotten=len(prepared.rows),
        samples=prepared.task.rows.samples,
        mask=file_digest(new / names.EDIT) if outcome.edit is not None else None,
        settings=file_digest(new / names.SETTINGS),
        method=str(settings["used"]),
        data=data | ({"frozen": prepared.frozen} if prepared.frozen is not None else {}),
        task=prepared.task.digest,
        code=this_code(device, threads),
        measured=parse_json(json.dumps(measured).encode()),
        files=names.digests(new),
        previous=head(ledger),
        sources={**prepared.task.sources, **method_file(prepared.settings.method)},
    )
    write_bytes(new / RECEIPT, receipt.content())
    write_bytes(new / LEDGER, written((*ledger, receipt.entry())))
    if key is not None:
        sign(new, key)
    return receipt


def measures(made: Made) -> dict[str, Any]:
    """What the receipt says was measured, but for an audit, as JSON has it."""
    outcome = made.outcome
    measured: dict[str, Any] = {
        "accuracies": [encode(record) for record in (outcome.history[0], outcome.history[-1])],
        "seconds": outcome.seconds,
    }
    if made.losses:
        measured["mean_losses"] = encode(dict(made.losses))
    if outcome.choice is not None:
        measured |= {"goal_met": outcome.choice.goal_met, "missing": list(outcome.choice.missing)}
    return dict(parse_json(json.dumps(measured)))


def _kept(earlier: State | None, new: Path) -> tuple[Entry, ...]:
    """Keep the receipts of earlier requests and their signatures, and return the ledger's lines."""
    if earlier is None:
        return ()
    for entry in earlier.ledger:
        name = names.earlier_receipt(entry.number)
        source = earlier.folder / (RECEIPT if entry.number == len(earlier.ledger) else name)
        if source.exists():
            write_bytes(new / name, source.read_bytes())
        name = names.earlier_signature(entry.number)
        source = earlier.folder / (names.SIGNATURE if entry.number == len(earlier.ledger) else name)
        if source.exists():
            write_bytes(new / name, source.read_bytes())
    return earlier.ledger


def _persistent(patch: Patch, model: nn.Module) -> Patch:
    """Without buffers that are not in the state_dict (caches), which no file of weights holds."""
    own = model.state_dict()
    return Patch({name: edit for name, edit in patch.edits.items() if name in own}, patch.digest)
