"""Trace samples to the records they are made of: rows of a dataset, and what it stores of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from expunge.data.batches import Batches, Data, as_batches, makes_samples_as, read_batches, row_reader
from expunge.data.columns import as_dataset
from expunge.data.indices import resolved, size_of, subset_rows
from expunge.data.objective import Batch, Objective
from expunge.data.samplers import loader_rows
from expunge.errors import InputError

PROBE = 16  # rows read to see whether a dataset is a view of the one it wraps, and whether its samples are random
CHUNK = 1024  # samples read at once


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches whose rows are unknown."""

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

    @property
    def rows_are_batches(self) -> bool:
        """As where a loader with batch_size=None reads a dataset of batches."""
        loader = self.loader
        return loader is not None and loader.batch_sampler is None and type(loader.sampler) is not BatchSampler

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
    """Split data by the datasets that their samples come from."""
    data = as_dataset(data, argument)
    batches = as_batches(data, argument)
    source = batches.source
    if isinstance(source, DataLoader):
        rows = loader_rows(source, argument)
        if rows is None:
            return [Stream(batches)]
        return [replace(part, loader=source) for part in _traced(source.dataset, rows, argument, objective)]
    if source is None:  # a list of batches
        return [Stream(batches)]
    dataset = source if isinstance(data, Batches) else data  # a mask would have been resolved in a copy, which no other data share
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
            parts = [_through_view(resolved(dataset, argument), rows, part) for part in parts]
    elif (inner := _viewed(dataset, rows, objective)) is not None:
        parts = [_through_view(dataset, rows, part) for part in _traced(inner, rows, argument, objective)]
    else:
        parts = [Part(dataset, rows, dataset, rows, torch.arange(len(rows)))]
    return [replace(part, within=(*part.within, dataset)) for part in parts]


def _through_view(view: Any, rows: Tensor, part: Part) -> Part:
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
    """The dataset that this one wraps row by row, as one with transforms does: its only dataset, of its length, with its labels.
    One that reads other rows than it is asked for reorders or mixes them, and is none.

    A view whose samples count as others, such as one that stamps a trigger on them, says so by `alters_samples = True`.
    """
    attributes = getattr(dataset, "__dict__", {}).items()
    datasets = [(name, value) for name, value in attributes if isinstance(value, Dataset) and not isinstance(value, IterableDataset)]
    if len(datasets) != 1 or size_of(datasets[0][1]) != size_of(dataset) or getattr(dataset, "alters_samples", False) or not len(rows):
        return None
    name, inner = datasets[0]
    probe = rows[torch.linspace(0, len(rows) - 1, min(PROBE, len(rows))).long()]
    labels, own = labels_at(inner, probe, objective), labels_at(dataset, probe, objective)
    if labels is None or own is None or not same_rows(labels, own).all():
        return None
    return inner if _reads_its_rows(dataset, name, inner, probe) else None


class _Noting(Dataset[Any]):
    """A dataset that notes the rows it is asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.rows: set[int] = set()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        self.rows.add(int(row))
        return self.dataset[row]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataset"], name)


def _reads_its_rows(view: Any, name: str, inner: Any, rows: Tensor) -> bool:
    """Whether a dataset reads only the requested row of the one it wraps; also true where that cannot be observed."""
    noting, size = _Noting(inner), size_of(inner) or 0
    try:
        noted = copy.copy(view)
        noted.__dict__[name] = noting
        for row in rows.tolist():
            noting.rows.clear()
            noted[row]
            if not noting.rows <= {row, row - size}:
                return False
    except Exception:  # a user's class that cannot be copied, or reads its data elsewhere
        return True
    return True


def labels_at(dataset: Any, rows: Tensor, objective: Objective) -> Tensor | None:
    """The targets of some samples, as they are read; None where they cannot be read."""
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
    """Which rows are equal: labels, or the classes that probabilities favour where the others are labels; none where forms differ."""
    if first.shape != second.shape:
        first, second = _classes(first), _classes(second)
    if first.shape != second.shape:
        return torch.zeros(len(first), dtype=torch.bool)
    return (first == second).reshape(len(first), -1).all(1)


def _classes(targets: Tensor) -> Tensor:
    if targets.numel() == len(targets):
        return targets.reshape(-1)
    return targets.argmax(1) if targets.is_floating_point() and targets.dim() == 2 else targets
