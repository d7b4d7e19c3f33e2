"""Trace the samples of data to the records they are made of: rows of a dataset, and what it holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from expunge.data.batches import Batches, Data, as_batches, makes_samples_as, read_batches, row_reader
from expunge.data.indices import resolved, size_of, subset_rows
from expunge.data.objective import Batch, Objective
from expunge.data.samplers import loader_rows
from expunge.errors import InputError

PROBE = 16  # rows that tell whether a dataset is a view of the one it holds, and whether chance has a part in its samples
CHUNK = 1024  # samples read at once


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches, of whose rows nobody can say more."""

    source: Batches

    def batches(self) -> Iterator[Batch]:
        return iter(self.source)


@dataclass(frozen=True, eq=False)
class Part:
    """Samples of one dataset, `origin`, and their `numbers`, the rows they are there.

    They are read from `data` at `rows`: another dataset where a view makes the samples of the records. `place` is where each sample stands
    in the whole of the data, `within` the datasets it was reached through.
    """

    data: Any
    rows: Tensor
    origin: Any
    numbers: Tensor
    place: Tensor
    within: tuple[Any, ...] = ()
    loader: DataLoader[Any] | None = None

    def batches(self) -> Iterator[Batch]:
        """All samples, in the order of `rows`."""
        return self.read(self.rows)

    def read(self, rows: Tensor) -> Iterator[Batch]:
        """These rows of `data`, put together as the loader does it, by its workers."""
        loader = self.loader
        if loader is None or (loader.collate_fn is default_collate and not loader.num_workers):
            return read_batches(row_reader(self.data), rows.split(CHUNK), "batches")
        settings = {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "worker_init_fn", "multiprocessing_context")}
        size = None if loader.batch_sampler is None else loader.batch_size or CHUNK
        return iter(as_batches(DataLoader(Subset(self.data, rows.tolist()), size, **settings)))


def parts_of(data: Data, argument: str, objective: Objective) -> list[Part | Stream]:
    """The data by the datasets that their samples come from."""
    batches = as_batches(data, argument)
    source = batches.source
    if isinstance(source, DataLoader):
        rows = loader_rows(source, argument)
        if rows is None:
            return [Stream(batches)]
        return [replace(part, loader=source) for part in _traced(source.dataset, rows, argument, objective)]
    if source is None:  # a list of batches
        return [Stream(batches)]
    dataset = source if isinstance(data, Batches) else data  # a mask would have been resolved in a copy, of which nobody else knows
    return [*_traced(dataset, torch.arange(len(source)), argument, objective)]


def _traced(dataset: Any, rows: Tensor, argument: str, objective: Objective) -> list[Part]:
    """Rows of a dataset, each with the dataset it comes from and its row there."""
    size = size_of(dataset)
    if size is not None:
        rows = torch.where(rows < 0, rows + size, rows)
    inner: Any
    if makes_samples_as(ConcatDataset, dataset):
        parts = _of_concatenation(dataset, rows, argument, objective)
    elif isinstance(dataset, Subset):
        parts = _traced(dataset.dataset, subset_rows(dataset, argument)[rows], argument, objective)
        if not makes_samples_as(Subset, dataset):
            parts = [_seen_through(resolved(dataset, argument), rows, part) for part in parts]
    elif (inner := _viewed(dataset, rows, objective)) is not None:
        parts = [_seen_through(dataset, rows, part) for part in _traced(inner, rows, argument, objective)]
    else:
        parts = [Part(dataset, rows, dataset, rows, torch.arange(len(rows)))]
    return [replace(part, within=(*part.within, dataset)) for part in parts]


def _seen_through(view: Any, rows: Tensor, part: Part) -> Part:
    return replace(part, data=view, rows=rows[part.place])


def _of_concatenation(dataset: ConcatDataset[Any], rows: Tensor, argument: str, objective: Objective) -> list[Part]:
    parts: list[Part] = []
    ends = ConcatDataset.cumsum([resolved(part, argument) for part in dataset.datasets])
    numbers = torch.bucketize(rows, torch.tensor(ends), right=True)
    for number, (inner, start) in enumerate(zip(dataset.datasets, [0, *ends], strict=False)):
        place = (numbers == number).nonzero().flatten()
        if len(place):
            parts += [replace(part, place=place[part.place]) for part in _traced(inner, rows[place] - start, argument, objective)]
    return parts


def _viewed(dataset: Any, rows: Tensor, objective: Objective) -> Any:
    """The dataset that this one gives row by row, as one with transforms does: the only one it holds, of its length, with its labels.

    A view whose samples count as others, such as one that stamps a trigger on them, says so by `alters_samples = True`.
    """
    values = getattr(dataset, "__dict__", {}).values()
    inner = [value for value in values if isinstance(value, Dataset) and not isinstance(value, IterableDataset)]
    if len(inner) != 1 or size_of(inner[0]) != size_of(dataset) or getattr(dataset, "alters_samples", False) or not len(rows):
        return None
    probe = rows[torch.linspace(0, len(rows) - 1, min(PROBE, len(rows))).long()]
    labels, own = labels_at(inner[0], probe, objective), labels_at(dataset, probe, objective)
    return inner[0] if labels is not None and own is not None and same_rows(labels, own).all() else None


def labels_at(dataset: Any, rows: Tensor, objective: Objective) -> Tensor | None:
    """The targets of some samples, as they are read; None where they cannot be told."""
    try:
        if callable(getattr(dataset, "batch_of", None)) or makes_samples_as(TensorDataset, dataset):
            return objective.targets(row_reader(dataset)(rows)).cpu()
        samples = [dataset[int(row)] for row in rows]
        if all(isinstance(sample, (tuple, list)) for sample in samples):
            samples = [(0, sample[-1]) for sample in samples]  # the inputs may be pictures, which nothing collates
        return objective.targets(default_collate(samples)).cpu()
    except (InputError, StopIteration, TypeError, RuntimeError, KeyError, AttributeError, IndexError, ValueError):
        return None


def same_rows(first: Tensor, second: Tensor) -> Tensor:
    """Which rows are equal; none where they have not one form."""
    if first.shape != second.shape:
        return torch.zeros(len(first), dtype=torch.bool)
    return (first == second).reshape(len(first), -1).all(1)
