"""Check a deletion request before anything is done: task, weights, forget set, method, earlier requests, stored sums."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from expunge.data.batches import Data
from expunge.data.overlap import check_disjoint
from expunge.errors import InputError, MismatchError
from expunge.methods import Method
from expunge.requests.folder import State, read_state
from expunge.requests.forget_sets import forget_rows
from expunge.requests.measuring import check_fitting, check_measurable
from expunge.requests.settings import Settings, build_method, check_settings, following, is_described, written
from expunge.requests.stored_mask import check_method
from expunge.requests.sums_store import Store, check_fits
from expunge.requests.task import Task, load_task
from expunge.requests.weights import digest_of, frozen_digest, load_weights, shared_names, weights_of
from expunge.runtime.modes import device_named
from expunge.storage.documents import excerpt, fingerprinted


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
    sums: str | os.PathLike[str] | None = None  # a store, as `expunge fisher build` makes it


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
    replaced: str | None = None  # a line: another method than that of the earlier requests, whose edit it replaces
    summed: int | None = None  # samples over which passes are made for Fisher sums, where the others come from a store
    frozen: str | None = None  # a digest of what the file of weights leaves out

    @property
    def forget(self) -> Data:
        return self.task.rows.at(torch.tensor(self.rows), True)

    @property
    def remain(self) -> Data:
        kept = torch.ones(self.task.rows.samples, dtype=torch.bool)
        kept[list(self.rows)] = False
        return self.task.rows.at(kept.nonzero().flatten(), False)


def prepare(request: Request, store: Store | None = None) -> Prepared:
    """Check all of a request; raises where it cannot be carried out."""
    check_settings(request.settings)
    task, earlier = load_task(request.task), read_state(Path(request.out))
    settings = following(request.settings, None if earlier is None else earlier.settings)
    settings = replace(settings, sums=None, sums_threads=None) if store is None else settings_for(store, settings)
    device = device_named(settings.device)
    method = build_method(settings, task.recipe)
    asked = forget_rows(request.forget, task, request.column)
    before = set() if earlier is None else earlier.ids
    rows = tuple(sorted({*asked, *before}))
    if len(rows) == task.rows.samples:
        found = f"{len(asked)} beside {len(before)} of earlier requests, all there are"
        raise InputError("forget", "must leave samples to keep; where all are to be forgotten, delete the model", found)
    check_measurable(method, task)
    stored = load_weights(request.weights, task.model)
    frozen, new = frozen_digest(task.model, stored), tuple(row for row in asked if row not in before)
    model = task.model.to(device)
    prepared = Prepared(task, model, stored, method, settings, rows, new, earlier, device, frozen=frozen)
    if store is not None:
        check_fits(store, task, model, check_method(method).kind)
    check_fitting(method, task, model, prepared.forget, settings.batch_size)
    _check_unseen(prepared)
    if earlier is not None:
        _check_same(prepared, earlier)
        return replace(prepared, replaced=_replaced(prepared, earlier))
    task.check_order()
    task.check_frozen(stored)
    return prepared


def settings_for(store: Store, settings: Settings) -> Settings:
    """With the batch size and threads of a store, for sums that are the same to the bit."""
    return replace(settings, batch_size=store.header.batch_size, sums=store.header.by, sums_threads=store.header.threads)


def _check_unseen(prepared: Prepared) -> None:
    """No sample to forget may be one of the test data, or of the validation data where the method takes some: what is measured there would
    be of samples that were trained on."""
    unseen: dict[str, Data | None] = {"test": prepared.task.test}
    if getattr(prepared.method, "takes_validation", False):
        unseen["validation"] = prepared.task.validation
    for name, data in unseen.items():
        if data is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # data that cannot be compared
            try:
                check_disjoint(prepared.forget, data, prepared.task.objective)
            except InputError as error:
                if error.argument != "remain":
                    raise
                rule = f"must not name samples of the {name} data, which {name}() returns too"
                raise InputError("forget", rule, error.found) from error


def _check_same(prepared: Prepared, earlier: State) -> None:
    """Earlier requests of the folder must be of these weights and data."""
    shared = shared_names(prepared.model)
    if digest_of(weights_of(prepared.model, prepared.stored), shared) != earlier.receipt.weights_before:
        raise MismatchError(f"weights: must be the original ones, which the requests in {earlier.folder} began with")
    known, found = earlier.receipt.data["train"], prepared.task.data
    if (known is not None and not prepared.task.is_data(known)) or prepared.task.rows.samples != earlier.receipt.samples:
        rule = f"train() must return the data of the requests in {earlier.folder}, in their order"
        samples, before = prepared.task.rows.samples, earlier.receipt.samples
        what = fingerprinted(found or "no digest") if samples == before else f"{samples} samples, not {before}"
        raise MismatchError(f"task: {rule}; found {what}")
    if earlier.receipt.data.get("frozen") not in (None, prepared.frozen):
        raise MismatchError(
            f"task: model() must give what the file of weights leaves out the values that it had in {earlier.folder}; found others"
        )


def _replaced(prepared: Prepared, earlier: State) -> str | None:
    """What is to be told where the method, its settings or the recipe are others than those of the earlier requests.

    The edit is drawn again from the original weights for all samples, so it is replaced for those forgotten earlier too. Where there are no
    others, there is nothing to do, and who gave a method is told so by an error.
    """
    if is_described(prepared.method, earlier.built):
        return None
    now, before = written(prepared.settings), written(earlier.settings)
    if now != before and not prepared.new:
        rule = f"must be that of {earlier.folder}, {before}, where all these samples are forgotten already; for another give a new folder"
        raise InputError("method", rule, now)
    if now == before:  # another recipe, or version
        now, before = excerpt(repr(prepared.method), 100), excerpt(str(earlier.built["repr"]), 100)
    return f"by {now}, and no longer by {before}: that edit is replaced, for the samples of earlier requests too"
