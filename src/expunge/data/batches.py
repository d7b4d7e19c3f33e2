"""Read datasets, loaders and plain iterables of batches as one type, which can be iterated again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from expunge.data.columns import as_dataset
from expunge.data.indices import resolved, subset_rows
from expunge.data.objective import LABEL_KEYS, Batch
from expunge.data.promises import Learned, delivered, listed, promised_batches, promised_samples, raise_if_broken_off
from expunge.data.samplers import check_samplers
from expunge.errors import InputError
from expunge.runtime.nested import combine_tensors, leaves, map_tensors, tensors

Data = Any  # a Dataset, a DataLoader, or an iterable of batches
NESTED = (Mapping, tuple, list)
FORMS = "must be a dataset, a data loader or an iterable of batches"


def joined(batches: Sequence[Batch], argument: str, rule: str) -> Batch:
    """The samples of all batches as one, on the device of the first; `rule` is the rule in the error where their forms differ."""
    try:
        return combine_tensors(batches, lambda parts: torch.cat([part.to(parts[0].device) for part in parts]))
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise InputError(argument, rule, str(error).splitlines()[0]) from error


def first_samples(batch: Batch) -> Batch:
    """The first two samples, enough to trace a graph; a batch that cannot be cut (with your own objective) is returned whole."""
    try:
        batch_size(batch)
    except InputError:
        return batch
    return take(batch, slice(0, 2))


def batch_size(batch: Batch) -> int:
    """The number of samples: the common first dimension of the batch's tensors."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors(batch)}
    if not sizes:
        raise InputError("batches", "a batch must hold tensors", type(batch).__name__)
    if len(sizes) > 1 or 0 in sizes:
        raise InputError("batches", "the tensors of a batch must share a first dimension of at least 1", sorted(sizes))
    return sizes.pop()


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """The samples of a batch at these rows. A list of plain values or an array with an entry per sample is cut, too."""
    first = next(iter(tensors(batch)), None)
    return _cut(batch, rows, len(first) if first is not None and first.dim() else 0)


def _cut(part: Batch, rows: slice | Tensor, samples: int) -> Batch:
    if isinstance(part, Tensor):
        return part[rows]
    if isinstance(part, numpy.ndarray) and part.ndim and len(part) == samples:
        return part[rows if isinstance(rows, slice) else rows.cpu().numpy()]
    if isinstance(part, list) and len(part) == samples and not any(isinstance(value, (Tensor, *NESTED)) for value in part):
        return part[rows] if isinstance(rows, slice) else [part[row] for row in torch.arange(samples)[rows.cpu()].tolist()]
    if isinstance(part, Mapping):
        return {key: _cut(value, rows, samples) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        parts = [_cut(value, rows, samples) for value in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    return part


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the batch to the device, detached from the caller's autograd graph; tensors are copied only where needed."""
    return map_tensors(batch, lambda tensor: _plain(tensor).to(device, non_blocking=True))


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()  # autograd would refuse to save it
    return tensor.detach() if tensor.requires_grad else tensor


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def measuring_size(model: nn.Module) -> int:
    """Batch size where only outputs are computed: large batches leave a CPU's caches (1000 take twice as long), small ones a GPU idle."""
    return 1000 if device_of(model).type == "cuda" else 128


@dataclass(frozen=True)
class Rows:
    """A dataset whose samples are read by tensor operations, on the device the rows are on, so that a CUDA graph may do it."""

    read: Callable[[Tensor], Batch]
    samples: int
    batch_size: int

    def shuffled(self, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        """An epoch's rows, batch by batch, in the same order as `Batches.shuffled`."""
        return _order(self.samples, seed).to(device).split(self.batch_size)


@dataclass(frozen=True)
class Batches:
    """Batches that can be iterated again; `shuffled(seed)` gives an epoch in another order.

    The length of a loader that does not say it is learned in the first whole pass. `len` makes that pass where needed; `known` does not.
    """

    read: Callable[[int | None], Iterator[Batch]]  # the seed of the order, or None for the order of the data
    length: int | Learned
    rows: Rows | None = None  # where the batches are rows of such a dataset
    source: Any = None  # the dataset or loader they come from

    def __iter__(self) -> Iterator[Batch]:
        return self.read(None)

    def __len__(self) -> int:
        if self.known is None:
            for _ in self:
                pass
        assert self.known is not None  # what reads such data notes their length at the end
        return self.known

    @property
    def known(self) -> int | None:
        """The length, where it is known without reading."""
        return self.length.number if isinstance(self.length, Learned) else self.length

    def shuffled(self, seed: int) -> Iterator[Batch]:
        return self.read(seed)

    def changed(self, read: Callable[[int | None], Iterator[Batch]]) -> Batches:
        """As many batches, read in another way."""
        return Batches(read, self.length)


def as_batches(data: Data, argument: str = "batches", batch_size: int = 128) -> Batches:
    """Read any data as `Batches`. A dataset is cut into batches; a loader keeps its own batches and order
    (its shuffling is the epoch's); an iterator, which can be read only once, is kept in memory. A length must be true."""
    if isinstance(data, Batches):
        return data
    data = as_dataset(data, argument)
    if isinstance(data, (str, bytes, Mapping)):
        raise InputError(argument, FORMS, type(data).__name__)
    if isinstance(data, DataLoader):
        batches = _from_loader(data, argument)
    elif isinstance(data, IterableDataset):
        batches = _from_loader(DataLoader(data, batch_size), argument)
    elif isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__") and _yields_samples(data)):
        batches = _from_dataset(resolved(data, argument), argument, batch_size)
    elif isinstance(data, Iterable):
        batches = _from_list(listed(data, argument))
    else:
        raise InputError(argument, FORMS, type(data).__name__)
    if batches.known == 0:
        raise InputError(argument, "must not be empty")
    return batches


def _yields_samples(data: Any) -> bool:
    """A list holds samples where its first entry holds a number or an array without dimensions, such as a label; else batches."""
    if not isinstance(data, (list, tuple)):
        return True
    if data and isinstance(data[0], Mapping):  # a batch may hold numbers beside a column of labels and samples of one dimension or more
        labels = [data[0][key] for key in LABEL_KEYS if key in data[0]]
        if any(label.dim() for label in tensors(labels[:1])) and any(tensor.dim() > 1 for tensor in tensors(data[0])):
            return False
    return len(data) > 0 and any(getattr(leaf, "ndim", 0) == 0 for leaf in leaves(data[0]))


def _from_loader(loader: DataLoader[Any], argument: str) -> Batches:
    check_samplers(loader, argument)
    length, samples = promised_batches(loader), promised_samples(loader)
    return Batches(lambda seed: delivered(loader, length, samples, first_dimension, argument), length, source=loader)


def first_dimension(batch: Batch) -> int:
    """The number of samples, as far as the first tensor tells it; 0 where it tells nothing."""
    first = next(iter(tensors(batch)), None)
    return 0 if first is None or not first.dim() else len(first)


def _from_list(batches: list[Batch]) -> Batches:
    def read(seed: int | None) -> Iterator[Batch]:
        return iter(batches if seed is None else [batches[index] for index in _order(len(batches), seed)])

    return Batches(read, len(batches))


def _from_dataset(dataset: Any, argument: str, batch_size: int) -> Batches:
    length = _length(dataset, argument)
    at_once = _at_once(dataset, argument)
    read_rows = at_once or _sample_by_sample(dataset, argument)

    def read(seed: int | None) -> Iterator[Batch]:
        order = torch.arange(length) if seed is None else _order(length, seed)
        return read_batches(read_rows, order.split(batch_size), argument)

    return Batches(read, -(-length // batch_size), None if at_once is None else Rows(at_once, length, batch_size), dataset)


def read_batches(read_rows: Callable[[Tensor], Batch], parts: Iterable[Tensor], argument: str) -> Iterator[Batch]:
    """A batch for every part of the rows, with one sample per row."""
    for rows in parts:
        try:
            batch = read_rows(rows)
        except (StopIteration, RuntimeError, IndexError) as error:  # the first would end the data here, unnoticed
            raise_if_broken_off(error, argument)
            raise
        sizes = {len(tensor) for tensor in tensors(batch) if tensor.dim()}
        if len(sizes) == 1 and sizes != {len(rows)}:
            raise InputError(argument, f"a dataset must give as many samples as rows are asked for, {len(rows)}", sizes.pop())
        yield batch


def row_reader(dataset: Any, argument: str = "dataset") -> Callable[[Tensor], Batch]:
    """A function that reads rows of a dataset as one batch; nothing is copied before.

    A dataset with a method `batch_of(rows)` is asked for the batch, a structure of tensors; columns of tensors are indexed; subsets and
    concatenations of these pass the rows on. Anything else is read one sample at a time.
    """
    return _at_once(dataset, argument) or _sample_by_sample(dataset, argument)


def _sample_by_sample(dataset: Any, argument: str) -> Callable[[Tensor], Batch]:
    return lambda rows: _collated([dataset[int(row)] for row in rows], argument)


def _at_once(dataset: Any, argument: str) -> Callable[[Tensor], Batch] | None:
    """A reader without a loop over samples, unless the dataset (or a subclass of torch's) has its own way to make a sample."""
    if callable(getattr(dataset, "batch_of", None)):
        return dataset.batch_of
    if makes_samples_as(TensorDataset, dataset):
        return lambda rows: tuple(tensor[rows.to(tensor.device)] for tensor in dataset.tensors)
    if makes_samples_as(Subset, dataset) and (inner := _at_once(dataset.dataset, argument)) is not None:
        subset = OnDevice(subset_rows(dataset, argument))
        return lambda rows: inner(subset.at(rows)[rows])
    if makes_samples_as(ConcatDataset, dataset):
        parts = [part for part in (_at_once(part, argument) for part in dataset.datasets) if part is not None]
        return _end_to_end(parts, dataset.cumulative_sizes, argument) if len(parts) == len(dataset.datasets) else None
    return None


def makes_samples_as(kind: Any, dataset: Any) -> bool:
    return isinstance(dataset, kind) and type(dataset).__getitem__ is kind.__getitem__


class OnDevice:
    """A table that is copied to the device of the rows it is indexed with, once per device."""

    def __init__(self, table: Tensor) -> None:
        self._copies = {table.device: table}

    def at(self, rows: Tensor) -> Tensor:
        if rows.device not in self._copies:
            self._copies[rows.device] = next(iter(self._copies.values())).to(rows.device)
        return self._copies[rows.device]


def _end_to_end(readers: list[Callable[[Tensor], Batch]], ends: list[int], argument: str) -> Callable[[Tensor], Batch]:
    """Read rows of concatenated datasets: every dataset reads its own, and the samples are returned in the order of the rows."""
    starts = [0, *ends[:-1]]

    def read(rows: Tensor) -> Batch:
        rows = torch.where(rows < 0, rows + ends[-1], rows)
        if rows.is_cuda:
            return _read_by_all(readers, ends, rows)
        parts = torch.bucketize(rows, torch.tensor(ends), right=True)
        batches = [readers[part](rows[parts == part] - starts[part]) for part in torch.unique(parts).tolist()]
        if len(batches) == 1:
            return batches[0]
        whole = joined(batches, argument, "the parts of a concatenation must hold samples of one shape")
        return take(whole, torch.argsort(torch.argsort(parts, stable=True)))

    return read


def _read_by_all(readers: list[Callable[[Tensor], Batch]], ends: list[int], rows: Tensor) -> Batch:
    """Every dataset reads all rows, clamped to its own, and `where` picks the right ones: nothing waits for the device."""
    batch = readers[0](rows.clamp(max=ends[0] - 1))
    for reader, start, end in zip(readers[1:], ends, ends[1:], strict=False):
        own = reader((rows - start).clamp(0, end - start - 1))
        batch = combine_tensors([batch, own], partial(_chosen, rows >= start))
    return batch


def _chosen(second: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The samples of the second tensor where `second` is true, else those of the first."""
    if parts[0].shape != parts[1].shape:
        raise ValueError(f"samples of shape {tuple(parts[0].shape[1:])} and {tuple(parts[1].shape[1:])}")
    return torch.where(second.view(-1, *(1,) * (parts[0].dim() - 1)), parts[1], parts[0])


def _collated(samples: list[Any], argument: str) -> Batch:
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        rule = f"samples must be tensors or numbers of one shape, or give a DataLoader with a collate_fn ({reason})"
        raise InputError(argument, rule, type(samples[0]).__name__) from error


def _length(data: Any, argument: str) -> int:
    try:
        return len(data)
    except (TypeError, NotImplementedError, ValueError) as error:
        rule = "must have a length; give a list of batches instead"
        raise InputError(argument, rule, type(data).__name__) from error


def _order(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
