"""Check a receipt offline: the folder it is in, weights, a proof of one id, a signature; with the task, by replaying the edit."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from expunge.data.row_digests import SPREAD, is_of_rows
from expunge.errors import ExpungeError, InputError
from expunge.requests import folder as names
from expunge.requests.commitments import Inclusion, inclusion
from expunge.requests.folder import check_new_file, ledger_at, misfits, read_openings, read_state, receipt_at
from expunge.requests.grouping import group_rows
from expunge.requests.ledger import LEDGER
from expunge.requests.prepared import Prepared
from expunge.requests.receipt import LIMITS, RECEIPT, Receipt, this_code
from expunge.requests.request import carry_out, summing_of
from expunge.requests.settings import ADDRESS, build_method
from expunge.requests.signing import check_signature
from expunge.requests.sources import method_file
from expunge.requests.stored_mask import check_method, draw_anew
from expunge.requests.task import load_task
from expunge.requests.undo import original_weights
from expunge.requests.weights import Tensors, digest_of, frozen_digest, load_saved, read_weights, without_wrapper
from expunge.requests.writing import Made, measures
from expunge.runtime.modes import device_named
from expunge.storage.codec import Count, decode, encode
from expunge.storage.documents import excerpt, read_json
from expunge.storage.files import write_json
from expunge.storage.folders import INSIDE

MEASURED = ("accuracies", "mean_losses", "goal_met", "missing")


@dataclass(frozen=True)
class Finding:
    """A line of a verification: what was checked, what does not fit, or what could not be compared."""

    fits: bool
    line: str
    compared: bool = True

    def __str__(self) -> str:
        return f"{'fits' if self.compared else 'not compared'}: {self.line}" if self.fits else f"DOES NOT FIT: {self.line}"


def verify(
    receipt: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    task: str | os.PathLike[str] | None = None,
    proof: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> Iterator[Finding]:
    """All that can be checked, finding by finding; the receipt must be in the folder it was written into, or in a copy of
    it, which may be named in its place."""
    path = Path(receipt) / RECEIPT if Path(receipt).is_dir() else Path(receipt)
    if not path.is_file() or path.name != RECEIPT:
        raise InputError("receipt", f"must be the {RECEIPT} of a folder of requests", os.fspath(receipt))
    if proof is not None and not Path(proof).is_file():
        raise InputError("proof", "must be a file that `expunge prove` wrote", os.fspath(proof))
    folder, alone = path.parent, proof is not None and _is_alone(path)
    beside = (Path(proof).name,) if proof is not None and Path(proof).parent.resolve() == folder.resolve() else ()
    wrong = list(misfits(folder, {*INSIDE, *beside}, alone))
    yield from (Finding(False, what) for what in wrong)
    if alone and not wrong:
        yield Finding(True, f"{RECEIPT} and {LEDGER} fit each other")
        yield Finding(True, "the other files of the receipt, which are not here", compared=False)
    elif not wrong:
        yield Finding(True, f"{RECEIPT}, {LEDGER} and all files of the folder fit each other")
    if key is not None:
        what = check_signature(folder, key)
        yield Finding(what is None, what or f"{names.SIGNATURE} is of this key")
    try:
        content = receipt_at(path)
    except InputError:  # told above
        return
    if content.does_not_prove != LIMITS:
        yield Finding(True, f"does_not_prove of {RECEIPT}: in other words than this version's", compared=False)
    if not wrong and not alone:
        yield from _weights_of_folder(folder, content)
    if weights is not None:
        yield _given_weights(Path(weights), folder, content)
    if proof is not None:
        yield _proof(Path(proof), folder)
    if task is not None and not wrong:
        yield from _replayed(folder, content, task, beside)


def _is_alone(path: Path) -> bool:
    """Whether a receipt was handed on without any of the files that it lists, as for a proof."""
    try:
        return not any((path.parent / name).exists() for name in receipt_at(path).files)
    except InputError:  # told by `misfits`
        return False


def _weights_of_folder(folder: Path, receipt: Receipt) -> Iterator[Finding]:
    try:
        after = digest_of(*load_saved(folder / names.WEIGHTS))
        yield Finding(after == receipt.weights_after, f"{names.WEIGHTS} holds the weights after")
        original_weights(folder)
        yield Finding(True, f"{names.PATCH} leads back to the weights before")
    except ExpungeError as error:
        yield Finding(False, str(error))


def _given_weights(path: Path, folder: Path, receipt: Receipt) -> Finding:
    stored = read_weights(path)
    own, shared = _as_saved(folder / names.WEIGHTS) or _as_saved(path) or (stored, {})
    found = digest_of(without_wrapper(stored, own), shared)
    if found == receipt.weights_after:
        return Finding(True, f"{path}: the weights after")
    if found == receipt.weights_before:
        return Finding(False, f"{path}: the weights before, with what was to be forgotten")
    return Finding(False, f"{path}: neither the weights after nor those before")


def _as_saved(path: Path) -> tuple[Tensors, dict[str, str]] | None:
    """None where it is no file that `expunge unlearn` wrote, or a receipt was handed on without it."""
    try:
        return load_saved(path)
    except (ExpungeError, OSError):
        return None


def _replayed(folder: Path, receipt: Receipt, task_file: str | os.PathLike[str], beside: Collection[str]) -> Iterator[Finding]:
    """The same edit once more, from the original weights, compared to the bit; files `beside` those of the folder may be there."""
    if not (folder / names.OPENINGS).is_file():
        yield Finding(False, f"{names.OPENINGS}: is missing, so that nobody can tell which samples to replay with")
        return
    task, state = load_task(task_file), read_state(folder, beside)
    assert state is not None
    yield Finding(task.digest == receipt.task, f"{task_file}: the task file of the receipt")
    yield from _sources({**task.sources, **method_file(state.settings.method)}, receipt)
    for name, data, digest in (("train", task.train, task.data), ("test", task.test, task.test_data)):
        known = receipt.data[name]
        if digest is None or (known is None and (type(data) is tuple or is_of_rows(digest))):  # not in receipts of an earlier version
            yield Finding(known is None, f"{name}(): data without a digest", compared=False)
        elif is_of_rows(known or digest):
            yield Finding(
                task.is_data(known), f"{name}(): the data of the receipt, by {min(SPREAD, task.rows.samples)} samples spread over them"
            )
        else:
            yield Finding(digest == known, f"{name}(): the data of the receipt")
    if task.rows.samples != receipt.samples:
        yield Finding(False, f"train(): has {task.rows.samples} samples, not {receipt.samples}")
        return
    settings = state.settings
    try:
        device = device_named(settings.device)
    except InputError:
        yield Finding(True, f"replayed: it was made on {excerpt(settings.device, 40)}, which is not here", compared=False)
        return
    yield from (Finding(False, f"{what}; the weights may differ for that alone") for what in _other_code(receipt, device))
    tensors, shared = original_weights(folder)
    own = task.model.state_dict(keep_vars=True)
    if not tensors.keys() <= own.keys() or any(tensors[name].shape != own[name].shape for name in tensors):
        yield Finding(False, "model(): another model than that of the receipt")
        return
    yield from _frozen(frozen_digest(task.model, tensors), receipt)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    rows = tuple(sorted(state.ids))
    prepared = Prepared(task, task.model.to(device), tuple(tensors), build_method(settings, task.recipe), settings, rows, (), None, device)
    if settings.sums is not None:
        drawn = draw_anew(summing_of(prepared), group_rows(task, settings.sums), rows)
        prepared = replace(prepared, method=drawn.mask(check_method(prepared.method)))
    made = carry_out(prepared, lambda line: None, False)
    fits = made.weights_after == receipt.weights_after
    yield Finding(fits, "replayed: the same weights, to the bit" if fits else "replayed: other weights than those of the receipt")
    if fits:
        yield from _replayed_words(made, receipt)


def _replayed_words(made: Made, receipt: Receipt) -> Iterator[Finding]:
    """What the receipt says of the same weights: the method, and what was measured but times and the audit."""
    method = made.outcome.method if isinstance(made.outcome.method, str) else repr(made.outcome.method)
    if ADDRESS.sub("", method) != ADDRESS.sub("", receipt.method):
        yield Finding(False, f"replayed: by {excerpt(method, 100)}, and not by {excerpt(receipt.method, 100)}")
    ours, theirs = measures(made), {name: receipt.measured.get(name) for name in MEASURED}
    wrong = [name for name in MEASURED if _timeless(ours.get(name)) != _timeless(theirs[name])]
    yield from (Finding(False, f"replayed: other {name.replace('_', ' ')} than those of the receipt") for name in wrong)
    if not wrong:
        yield Finding(True, "replayed: the same measures before and after")


def _timeless(content: Any) -> Any:
    """Without what differs each time."""
    if isinstance(content, list):
        return [_timeless(part) for part in content]
    return {name: part for name, part in content.items() if name != "seconds"} if isinstance(content, dict) else content


def _frozen(found: str | None, receipt: Receipt) -> Iterator[Finding]:
    """What the file of weights leaves out, as beside adapters."""
    known = receipt.data.get("frozen")
    if known is None and found is not None:
        yield Finding(True, "model(): what is frozen, not in receipts of this age", compared=False)
    elif known is not None:
        yield Finding(found == known, "model(): what is frozen, as in the receipt")


def _sources(ours: Mapping[str, str], receipt: Receipt) -> Iterator[Finding]:
    """Each file that the task imports from its folder, and that of a method of one's own."""
    if receipt.sources is None:
        yield from (Finding(True, f"{name}: imported by the task, not in receipts of this age", compared=False) for name in ours)
        return
    for name in sorted({*ours, *receipt.sources}):
        if name not in receipt.sources:
            yield Finding(False, f"{name}: imported by the task now, not so in the receipt")
        elif name not in ours:
            yield Finding(False, f"{excerpt(name)}: not imported by the task now, but in the receipt")
        else:
            yield Finding(ours[name] == receipt.sources[name], f"{name}: the file of the receipt")


def _other_code(receipt: Receipt, device: torch.device) -> Iterator[str]:
    ours, theirs = encode(this_code(device, receipt.code.threads)), encode(receipt.code)
    yield from (
        f"{name}: {excerpt(ours[name], 40)} here, {excerpt(theirs[name], 40)} in the receipt" for name in ours if ours[name] != theirs[name]
    )


def prove(folder: str | os.PathLike[str], number: int, out: str | os.PathLike[str]) -> Path:
    """Write a proof that an id was forgotten, which shows no other id; `verify(..., proof=...)` checks it."""
    check_new_file(out)
    row = number if isinstance(number, Integral) and not isinstance(number, bool) else None
    for entry, opening in read_openings(Path(folder)):
        if row is not None and int(row) in opening.ids:
            return write_json(out, {"request": entry.number} | encode(inclusion(int(row), opening.salts())))
    raise InputError("id", "must be of a sample that was forgotten", number)


def _proof(path: Path, folder: Path) -> Finding:
    try:
        ledger = ledger_at(folder / LEDGER)
    except InputError as error:
        return Finding(False, f"{path}: cannot be checked without the ledger ({error})")
    try:
        content = read_json(path)
        number: int = decode(Count, content.pop("request"), "request")
        proof: Inclusion = decode(Inclusion, content, "the proof")
        roots = {entry.number: (entry.commitments, entry.samples) for entry in ledger}
        fits = roots.get(number) == (proof.root(), proof.leaves)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Finding(False, f"{path}: is no proof of an id ({excerpt(error)})")
    return Finding(fits, f"{path}: sample {proof.id} is among those of request {number}" if fits else f"{path}: leads to another ledger")
