"""Datasets, loaders and plain iterables of batches, as one thing that can be read again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from expunge.errors import InputError
from expunge.objective import Batch

Data = Any  # a Dataset, a DataLoader, or an iterable of batches
FORMS = "must be a dataset, a data loader or an iterable of batches"


def each_tensor(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with every tensor in it changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(each_tensor(value, change) for value in batch)
    return batch


def tensors(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    each_tensor(batch, note)
    return found


def batch_size(batch: Batch) -> int:
    """The number of samples: the common first dimension of the batch's tensors."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors(batch)}
    if not sizes:
        raise InputError("batches", "a batch must hold tensors", type(batch).__name__)
    if len(sizes) > 1 or 0 in sizes:
        raise InputError("batches", "the tensors of a batch must share a first dimension of at least 1", sorted(sizes))
    return sizes.pop()


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """Some samples of a batch."""
    return each_tensor(batch, lambda tensor: tensor[rows])


def to_device(batch: Batch, device: torch.device) -> Batch:
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives."""
    for tensor in [*model.parameters(), *model.buffers()]:
        return tensor.device
    return torch.device("cpu")


@dataclass(frozen=True)
class Batches:
    """Batches that can be iterated again; `shuffled(seed)` gives an epoch in another order."""

    read: Callable[[int | None], Iterator[Batch]]  # the seed of the order, or None for the order of the data
    length: int

    def __iter__(self) -> Iterator[Batch]:
        return self.read(None)

    def __len__(self) -> int:
        return self.length

    def shuffled(self, seed: int) -> Iterator[Batch]:
        return self.read(seed)


def as_batches(data: Data, argument: str = "batches", batch_size: int = 128) -> Batches:
    """Anything a user may hold, as `Batches`. A dataset is cut into batches; a loader keeps its own batches and order
    (its own shuffling is the epoch's); an iterator, which can be read only once, is kept in memory."""
    if isinstance(data, Batches):
        return data
    if isinstance(data, (str, bytes, Mapping)):
        raise InputError(argument, FORMS, type(data).__name__)
    if isinstance(data, DataLoader):
        found = _from_loader(data, argument)
    elif isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__") and _yields_samples(data)):
        found = _from_dataset(data, argument, batch_size)
    elif isinstance(data, Iterable):
        found = _from_list(list(data))
    else:
        raise InputError(argument, FORMS, type(data).__name__)
    if len(found) == 0:
        raise InputError(argument, "must not be empty")
    return found


def _yields_samples(data: Any) -> bool:
    """A list holds samples where its first entry holds a number or an array without dimensions, such as a label; else batches."""
    if not isinstance(data, (list, tuple)):
        return True
    return len(data) > 0 and any(getattr(leaf, "ndim", 0) == 0 for leaf in _leaves(data[0]))


def _leaves(entry: Any) -> Iterator[Any]:
    """What an entry holds, however nested; names and missing values, which tell nothing, left out."""
    if isinstance(entry, (Mapping, tuple, list)):
        for part in entry.values() if isinstance(entry, Mapping) else entry:
            yield from _leaves(part)
    elif entry is not None and not isinstance(entry, (str, bytes)):
        yield entry


def _from_loader(loader: DataLoader[Any], argument: str) -> Batches:
    return Batches(lambda seed: iter(loader), _length(loader, argument))


def _from_list(held: list[Batch]) -> Batches:
    def read(seed: int | None) -> Iterator[Batch]:
        return iter(held if seed is None else [held[index] for index in _order(len(held), seed)])

    return Batches(read, len(held))


def _from_dataset(dataset: Any, argument: str, batch_size: int) -> Batches:
    length = _length(dataset, argument)
    columns = _columns(dataset)

    def read(seed: int | None) -> Iterator[Batch]:
        order = torch.arange(length) if seed is None else _order(length, seed)
        for rows in order.split(batch_size):
            yield _collated([dataset[int(row)] for row in rows], argument) if columns is None else columns.take(rows)

    return Batches(read, -(-length // batch_size))


def _collated(samples: list[Any], argument: str) -> Batch:
    try:
        return torch.utils.data.default_collate(samples)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(argument, f"samples must be tensors or numbers of one shape ({reason})", type(samples[0]).__name__) from error


def _length(data: Any, argument: str) -> int:
    try:
        return len(data)
    except TypeError as error:
        rule = "must have a length, and so must the dataset of a loader; give a list of batches instead"
        raise InputError(argument, rule, type(data).__name__) from error


@dataclass(frozen=True)
class _Columns:
    """Tensors that are indexed a batch at a time, and which of their rows count (None: all). Nothing is copied before a batch is read."""

    tensors: tuple[Tensor, ...]
    rows: Tensor | None = None

    def take(self, rows: Tensor) -> Batch:
        chosen = rows if self.rows is None else self.rows[rows]
        return tuple(tensor[chosen.to(tensor.device)] for tensor in self.tensors)


def _columns(dataset: Any) -> _Columns | None:
    """Tensor datasets and subsets of them, unless a subclass has its own way to make a sample."""
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return _Columns(dataset.tensors)
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        columns = _columns(dataset.dataset)
        rows = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        return columns and _Columns(columns.tensors, rows if columns.rows is None else columns.rows[rows])
    return None


def _order(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
