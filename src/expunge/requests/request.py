"""Carry out a deletion request: from a task file, weights and a forget set to a folder with new weights and the receipt."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge.data.batches import Data
from expunge.data.digest import data_digest
from expunge.data.overlap import check_disjoint
from expunge.editing.patches import Patch
from expunge.errors import InputError, MismatchError
from expunge.methods import Method
from expunge.outcome import Outcome
from expunge.requests import folder as names
from expunge.requests.commitments import Opening
from expunge.requests.folder import State, read_state
from expunge.requests.forget_sets import forget_rows
from expunge.requests.ledger import LEDGER, head, written
from expunge.requests.receipt import RECEIPT, Receipt, this_code
from expunge.requests.settings import Settings, build_method, described
from expunge.requests.signing import private_key, sign
from expunge.requests.task import Task, load_task
from expunge.requests.weights import digest_of, file_digest, load_weights, save_weights, shared_names, weights_of
from expunge.runtime.modes import device_named
from expunge.storage.codec import encode
from expunge.storage.files import write_bytes, write_json
from expunge.storage.folders import reserved, signature
from expunge.unlearning import unlearn
from expunge.validate import check_whole

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """Samples to forget, of a model and data that a task file names. `out` is the folder of this model's requests: a later request there
    adds its samples to those of the earlier ones, and the edit is drawn again from the original weights for all of them."""

    task: str | os.PathLike[str]
    weights: str | os.PathLike[str]
    forget: str
    out: str | os.PathLike[str]
    column: str | None = None
    settings: Settings = Settings()
    sign: str | os.PathLike[str] | None = None  # a private key


@dataclass(frozen=True)
class Prepared:
    """A request that was checked: nothing has been written or changed yet. `new` are the samples it adds to those of `earlier`."""

    task: Task
    model: nn.Module
    stored: tuple[str, ...]  # names in the file of weights
    method: Method
    settings: Settings
    rows: tuple[int, ...]
    new: tuple[int, ...]
    earlier: State | None
    device: torch.device

    @property
    def forget(self) -> Data:
        return self.task.rows.at(torch.tensor(self.rows), True)

    @property
    def remain(self) -> Data:
        kept = torch.ones(self.task.rows.samples, dtype=torch.bool)
        kept[list(self.rows)] = False
        return self.task.rows.at(kept.nonzero().flatten(), False)


@dataclass(frozen=True)
class Made:
    """What was made of a request, for whoever examines it before the receipt is written."""

    prepared: Prepared
    outcome: Outcome
    weights_before: str
    weights_after: str


Examine = Callable[[Made, Path], Mapping[str, Any]]  # writes files into the folder, returns what the receipt says of them


def prepare(request: Request) -> Prepared:
    """Check all of a request; raises where it cannot be carried out."""
    task = load_task(request.task)
    settings, device = request.settings, device_named(request.settings.device)
    check_whole("batch_size", settings.batch_size, minimum=1)
    if settings.threads is not None:
        check_whole("threads", settings.threads, minimum=1, maximum=1024)
    method = build_method(settings, task.recipe)
    earlier = read_state(Path(request.out))
    asked = forget_rows(request.forget, task, request.column)
    before = set() if earlier is None else earlier.ids
    rows = tuple(sorted({*asked, *before}))
    if len(rows) == task.rows.samples:
        found = f"{len(asked)} beside {len(before)} of earlier requests, all there are"
        raise InputError("forget", "must leave samples to keep; where all are to be forgotten, delete the model", found)
    stored = load_weights(request.weights, task.model)
    model = task.model.to(device)
    prepared = Prepared(task, model, stored, method, settings, rows, tuple(row for row in asked if row not in before), earlier, device)
    _check_unseen(prepared)
    if earlier is not None:
        _check_same(prepared, earlier)
    return prepared


def fulfil(request: Request, say: Say = lambda line: None, progress: bool | None = None, examine: Examine | None = None) -> Receipt:
    """Carry out a request and return its receipt; one whose samples are all forgotten already returns that of the last.

    The folder is replaced whole at the end, or stays as it was. `examine` is called with what was made and the folder to be, before the
    receipt is written: it may add files, which the receipt then lists, and returns what the receipt says under `measured`.
    """
    if request.sign is not None:
        private_key(request.sign)
    with reserved("out", request.out, names.COMMAND) as place:
        prepared = prepare(request)
        if prepared.earlier is not None and not prepared.new:
            say(f"all {len(prepared.rows)} samples were forgotten before; nothing to do")
            return prepared.earlier.receipt
        log = _Log(say)
        made = carry_out(prepared, log, progress)
        receipts: list[Receipt] = []
        place.save(lambda new: receipts.append(_write(new, made, log, examine, request.sign)))
    return receipts[0]


def carry_out(prepared: Prepared, say: Say, progress: bool | None = None) -> Made:
    """Make the new weights; nothing is written."""
    task, shared = prepared.task, shared_names(prepared.model)
    add = f", {len(prepared.new)} of them new" if prepared.earlier is not None else ""
    say(f"forget {len(prepared.rows)} of {task.rows.samples} samples{add}, by {prepared.settings.method}, on {prepared.device}")
    choosing = {"validation": task.validation} if getattr(prepared.method, "takes_validation", False) else {}
    watched = {"forget": prepared.forget, "test": task.test}
    with one_number_of_threads(prepared.settings.threads), _told(say):
        outcome = unlearn(
            prepared.model,
            prepared.forget,
            prepared.remain,
            prepared.method,
            objective=task.objective,
            watch=watched,
            batch_size=prepared.settings.batch_size,
            progress=progress,
            **choosing,
        )
    if outcome.patch is None:
        raise InputError("method", "must keep the model's parameters, so that it can be undone", type(prepared.method).__name__)
    own = {shared.get(name, name) for name in prepared.model.state_dict()}
    changed = {name for name, edit in outcome.patch.edits.items() if len(edit.indices) and name in own}
    if left_out := sorted(changed - {*prepared.stored}):
        raise InputError("weights", "must hold all that the method changes; save the whole state_dict", left_out[0])
    for line in str(outcome).splitlines():
        say(line)
    before, after = (digest_of(weights_of(model, prepared.stored), shared) for model in (prepared.model, outcome.model))
    return Made(prepared, outcome, before, after)


@contextmanager
def one_number_of_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_unseen(prepared: Prepared) -> None:
    """No sample to forget may be one of the test data: what is measured there would be of samples that were trained on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # data that cannot be compared
        try:
            check_disjoint(prepared.forget, prepared.task.test, prepared.task.objective)
        except InputError as error:
            if error.argument != "remain":
                raise
            raise InputError("forget", "must not name samples of the test data, which test() returns too", error.found) from error


def _check_same(prepared: Prepared, earlier: State) -> None:
    """Earlier requests of the folder must be of these weights and data."""
    shared = shared_names(prepared.model)
    if digest_of(weights_of(prepared.model, prepared.stored), shared) != earlier.receipt.weights_before:
        raise MismatchError(f"weights: must be the original ones, which the requests in {earlier.folder} began with")
    if (found := data_digest(prepared.task.train)) != earlier.receipt.data[
        "train"
    ] or prepared.task.rows.samples != earlier.receipt.samples:
        raise MismatchError(f"task: train() must return the data of the requests in {earlier.folder}; found {found or 'no digest'}")


class _Log:
    """Lines that are said, and kept for the log."""

    def __init__(self, say: Say) -> None:
        self.say, self.lines = say, [time.strftime("%Y-%m-%dT%H:%M:%SZ begun", time.gmtime())]

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.say(line)


@contextmanager
def _told(say: Say) -> Iterator[None]:
    """Warnings within are lines, and not lost in what a terminal shows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for line in dict.fromkeys(" ".join(f"warning: {warning.message}".split()) for warning in caught):
        say(line)


def _write(new: Path, made: Made, log: _Log, examine: Examine | None, key: str | os.PathLike[str] | None) -> Receipt:
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
    ledger = earlier.ledger if earlier is not None else ()
    if earlier is not None:
        for entry in ledger:
            name = names.earlier_receipt(entry.number)
            source = earlier.folder / (RECEIPT if entry.number == len(ledger) else name)
            if source.exists():
                write_bytes(new / name, source.read_bytes())
    measured = {"accuracies": [encode(record) for record in (outcome.history[0], outcome.history[-1])], "seconds": outcome.seconds}
    if outcome.choice is not None:
        measured |= {"goal_met": outcome.choice.goal_met, "missing": list(outcome.choice.missing)}
    if examine is not None:
        measured |= dict(examine(made, new))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_bytes(new / names.LOG, "".join(f"{line}\n" for line in (*log.lines, f"{now} ended")).encode(errors="replace"))
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
        data={"train": data_digest(prepared.task.train), "test": data_digest(prepared.task.test)},
        task=prepared.task.digest,
        code=this_code(device, threads),
        measured=json.loads(json.dumps(measured)),
        files=names.digests(new),
        previous=head(ledger),
    )
    write_bytes(new / RECEIPT, receipt.content())
    write_bytes(new / LEDGER, written((*ledger, receipt.entry())))
    if key is not None:
        sign(new, key)
    return receipt


def _persistent(patch: Patch, model: nn.Module) -> Patch:
    """Without buffers that are not in the state_dict (caches), which no file of weights holds."""
    own = model.state_dict()
    return Patch({name: edit for name, edit in patch.edits.items() if name in own}, patch.digest)
