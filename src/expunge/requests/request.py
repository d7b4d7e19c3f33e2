"""Carry out a deletion request: from a task file, weights and a forget set to a folder with new weights and the receipt."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from expunge.errors import InputError
from expunge.requests import folder as names
from expunge.requests.measuring import has_labels, mean_losses
from expunge.requests.prepared import Prepared, Request, prepare
from expunge.requests.receipt import Receipt
from expunge.requests.signing import private_key, sign_later
from expunge.requests.stored_mask import Drawn, StoredMask, check_method, draw, dropped_rows, samples_to_sum, take_out
from expunge.requests.summing import Summing
from expunge.requests.sums_store import Store, opened
from expunge.requests.weights import digest_of, shared_names, weights_of
from expunge.requests.working import is_begun, kept_trainings, key_of, working
from expunge.requests.writing import Examine, Made, write_folder
from expunge.runtime.exits import described
from expunge.storage.files import check_folder
from expunge.storage.folders import check_place, remove, reserved
from expunge.unlearning import unlearn

Say = Callable[[str], None]


def fulfil(request: Request, say: Say = lambda line: None, progress: bool | None = None, examine: Examine | None = None) -> Receipt:
    """Carry out a request and return its receipt; one whose samples are all forgotten already returns that of the last.

    The folder is replaced whole at the end, or stays as it was. After a kill the same request goes on: its trainings, and finished parts
    of the audit, are kept in a private folder meanwhile. `examine` is called with what was made and the folder to be, before the
    receipt is written: it may add files, which the receipt then lists, and returns what the receipt says under `measured`.
    """
    if request.sign is not None:
        private_key(request.sign)
    with reserved("out", request.out, names.COMMAND) as place, store_of(request) as store:
        prepared = prepare(request, store)
        if prepared.earlier is not None and not prepared.new:
            say(f"all {len(prepared.rows)} samples were forgotten before; nothing to do")
            if store is not None and len(store.header.dropped) < len(prepared.earlier.ledger):  # killed before
                take_out(store, drawn_from(store, prepared), [entry.commitments for entry in prepared.earlier.ledger])
            if request.sign is not None:
                sign_later(place.folder, place.new, request.sign)
            remove(place.work)  # killed before
            return prepared.earlier.receipt
        log = _Log(say)
        if prepared.replaced is not None:
            log(prepared.replaced)
        drawn = None if store is None else drawn_from(store, prepared, log)
        receipts: list[Receipt] = []
        key = key_of(prepared)
        with working(place, key) as work:
            if is_begun(work):
                log("this request was stopped before: it goes on")
            with kept_trainings(work, prepared, key):
                edited = prepared if drawn is None else replace(prepared, method=drawn.mask(check_method(prepared.method)))
                made = replace(carry_out(edited, log, progress), work=work)
            place.save(lambda new: receipts.append(write_folder(new, made, log.lines, examine, request.sign)))
        if store is not None and drawn is not None:
            earlier = prepared.earlier.ledger if prepared.earlier is not None else ()
            with _after_the_request(request, store):
                take_out(store, drawn, [*(entry.commitments for entry in earlier), receipts[0].commitments])
    return receipts[0]


def checked(request: Request) -> Prepared:
    """All checks of a request and nothing else: key, folder, store, task, weights, samples."""
    if request.sign is not None:
        private_key(request.sign)
    check_place("out", request.out, names.COMMAND)
    with store_of(request) as store:
        prepared = prepare(request, store)
        if store is not None:
            prepared = replace(prepared, summed=samples_to_sum(store, prepared.rows, dropped_before(store, prepared)))
    return prepared


@contextmanager
def _after_the_request(request: Request, store: Store) -> Iterator[None]:
    """What stops the change of the store must not pass for a request that was not made."""
    done = f"{os.fspath(request.out)}: the request is done, but its samples are still in {store.folder}; the same command takes them out"
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(done) from None
    except OSError as error:
        raise OSError(f"{done} ({described(error)})") from error


@contextmanager
def store_of(request: Request) -> Iterator[Store | None]:
    if request.sums is None:
        yield None
        return
    check_folder("sums", request.sums)
    with opened(request.sums) as store:
        yield store


def drawn_from(store: Store, prepared: Prepared, say: Say = lambda line: None) -> Drawn:
    """The sums that a request takes out of a store."""
    dropped = dropped_before(store, prepared)
    say(f"Fisher sums of all but these samples from {store.folder}")
    return draw(store, summing_of(prepared), prepared.rows, dropped)


def dropped_before(store: Store, prepared: Prepared) -> list[int]:
    """The rows that the store lacks; raises MismatchError where they are not those of the folder's requests."""
    earlier = prepared.earlier
    return dropped_rows(store, [] if earlier is None else [(opening.root(), opening.ids) for opening in earlier.openings or ()])


def summing_of(prepared: Prepared) -> Summing:
    settings = prepared.settings
    return Summing(prepared.task, prepared.model, check_method(prepared.method).kind, settings.batch_size, settings.sums_threads or 1)


def carry_out(prepared: Prepared, say: Say, progress: bool | None = None) -> Made:
    """Make the new weights; nothing is written."""
    task, shared = prepared.task, shared_names(prepared.model)
    add = f", {len(prepared.new)} of them new" if prepared.earlier is not None else ""
    say(f"forget {len(prepared.rows)} of {task.rows.samples} samples{add}, by {prepared.settings.method}, on {prepared.device}")
    choosing = {"validation": task.validation} if getattr(prepared.method, "takes_validation", False) else {}
    measured = {"forget": prepared.forget, "test": task.test}
    labelled = has_labels(task)
    with one_number_of_threads(prepared.settings.threads), told(say):
        outcome = unlearn(
            prepared.model,
            prepared.forget,
            prepared.remain,
            prepared.method,
            objective=task.objective,
            watch=measured if labelled else {},
            batch_size=prepared.settings.batch_size,
            progress=progress,
            **choosing,
        )
    if isinstance(prepared.method, StoredMask):
        outcome = replace(outcome, method=prepared.method.method)
    if outcome.patch is None:
        raise InputError("method", "must keep the model's parameters, so that it can be undone", type(prepared.method).__name__)
    own = {shared.get(name, name) for name in prepared.model.state_dict()}
    changed = {name for name, edit in outcome.patch.edits.items() if len(edit.indices) and name in own}
    if left_out := sorted(changed - {*prepared.stored}):
        raise InputError("weights", "must hold all that the method changes; save the whole state_dict", left_out[0])
    before, after = (digest_of(weights_of(model, prepared.stored), shared) for model in (prepared.model, outcome.model))
    if before == after and outcome.choice is not None:  # what is measured was so before, and nothing was forgotten
        untouched = replace(outcome.choice, goal_met=False, missing=(*outcome.choice.missing, "no weight was changed"))
        outcome = replace(outcome, choice=untouched)
    for line in str(outcome).splitlines():
        say(line)
    if before == after:
        say("warning: no weight was changed, the new weights are the original ones; give another method, or other settings (--set)")
    losses = {} if labelled else mean_losses(task, prepared.model, outcome.model, measured, prepared.settings.batch_size)
    if losses:
        say(f"mean loss: {', '.join(f'{name} {loss}' for name, loss in losses.items())}")
    return Made(prepared, outcome, before, after, losses, say)


@contextmanager
def one_number_of_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Log:
    """Lines that are said, and kept for the log."""

    def __init__(self, say: Say) -> None:
        self.say, self.lines = say, [time.strftime("%Y-%m-%dT%H:%M:%SZ begun", time.gmtime())]

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.say(line)


@contextmanager
def told(say: Say) -> Iterator[None]:
    """Warnings within are lines, and not lost in what a terminal shows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for line in dict.fromkeys(" ".join(f"warning: {warning.message}".split()) for warning in caught):
        say(line)
