"""Determine which rows of its dataset a loader reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence, Sized
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from expunge.data.indices import check_unmasked, rows_of, size_of
from expunge.errors import UncheckedWarning
from expunge.runtime.callers import level_of_caller

WHAT = "a sampler's indices "


def check_samplers(loader: DataLoader[Any], argument: str) -> None:
    """Torch takes true and false for rows 1 and 0 of some datasets, so masks below a loader are refused."""
    check_unmasked(loader.dataset, argument)
    if isinstance(loader.dataset, IterableDataset):
        return
    listed = _listed(_source(loader))
    if listed is not None:
        rows_of(listed, size_of(loader.dataset), argument, WHAT, mask=False)


def loader_rows(loader: DataLoader[Any], argument: str) -> Tensor | None:
    """The rows a loader may read, whatever its order in an epoch; None where only reading it would show.

    A sampler that draws may draw any row of its source, which need not be the dataset: `RandomSampler(range(40))`. A user's own sampler
    is read twice: where it draws other rows the second time it may draw more, and an `UncheckedWarning` says so.
    """
    size = size_of(loader.dataset)
    if size is None or isinstance(loader.dataset, IterableDataset):
        return None
    source = _source(loader)
    if type(source) is RandomSampler or (type(source) is DistributedSampler and source.shuffle):
        return _drawn_from(source, size, argument)
    if type(source) is SequentialSampler:
        rows = _drawn_from(source, size, argument)
    elif type(source) is WeightedRandomSampler:
        return torch.as_tensor(source.weights).nonzero().flatten()
    elif (listed := _listed(source)) is not None:
        rows = rows_of(listed, size, argument, WHAT, mask=False)
    elif isinstance(source, Iterable) and iter(source) is not source:
        rows, again = (rows_of(_drawn(source), size, argument, WHAT, mask=False) for _ in range(2))
        if {*rows.tolist()} != {*again.tolist()}:
            rule = "its sampler draws other rows in each epoch, so make sure that none is in both the forget and the remain data"
            warnings.warn(f"{argument}: {rule}", UncheckedWarning, stacklevel=level_of_caller())
            return torch.cat([rows, again]).unique()
    else:
        return None
    ordered = type(loader.batch_sampler) is BatchSampler and not isinstance(source, SubsetRandomSampler)
    if ordered and loader.drop_last and loader.batch_size:
        return rows[: len(rows) - len(rows) % loader.batch_size]
    return rows


def _source(loader: DataLoader[Any]) -> Any:
    """What decides on the rows: the sampler, or the batch sampler in its place."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler


def _drawn_from(source: Any, size: int, argument: str) -> Tensor:
    """The rows of the source that one of torch's samplers was made for, from the first on."""
    made_for = size_of(source.dataset if type(source) is DistributedSampler else source.data_source)
    return rows_of(range(size if made_for is None else made_for), size, argument, WHAT, mask=False)


def _listed(source: Any) -> Any:
    """The rows of a sampler that holds them: of torch's own, or a list of rows or of batches of them; None for others."""
    if type(source) is SubsetRandomSampler:
        return source.indices
    if isinstance(source, (Tensor, numpy.ndarray, range)):
        return source.reshape(-1) if isinstance(source, (Tensor, numpy.ndarray)) else source
    return _flat(source) if isinstance(source, (list, tuple)) else None


def _flat(rows: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for entry in rows:
        flat += list(entry) if isinstance(entry, (list, tuple, range)) or getattr(entry, "ndim", 0) > 0 else [entry]
    return flat


def _drawn(source: Iterable[Any]) -> list[Any]:
    """The rows of one epoch, no more than it promises."""
    return _flat([*islice(source, len(source) if isinstance(source, Sized) else None)])
