"""Read what a dataset stores of its records, before transforms, and where in memory it lies."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from expunge.data.batches import makes_samples_as
from expunge.data.fingerprints import has_bytes
from expunge.data.indices import size_of
from expunge.data.objective import Batch


class Memory(NamedTuple):
    """Where the first column of some records lies: two of one layout and address are one, and others in one storage are others."""

    layout: tuple[Any, ...]
    storage: int
    addresses: Tensor


class Stored(NamedTuple):
    """How to read what is stored of some records. Records of equal `kind` can be compared; where `tells_all`, different records make
    different samples."""

    kind: tuple[Any, ...]
    read: Callable[[Tensor], Batch]
    tells_all: bool


def memory_of(dataset: Any, numbers: Tensor) -> Memory | None:
    """None where records have no place of their own."""
    columns = _tensors(dataset)
    if not columns or not has_bytes(columns[0]) or not columns[0].stride(0) or not columns[0].numel():
        return None
    first = columns[0]
    layout = (first.device, first.dtype, first.shape[1:], first.stride()[1:])
    return Memory(layout, first.untyped_storage().data_ptr(), first.data_ptr() + numbers * first.stride(0) * first.element_size())


def stored_by(dataset: Any) -> Stored | None:
    """`tensors` as a TensorDataset and our images have them; `data` with `targets` or `labels`, or `samples` of files, as torchvision's."""
    kind, own = type(dataset), isinstance(dataset, TensorDataset) and not makes_samples_as(TensorDataset, dataset)
    if columns := _tensors(dataset):
        return Stored((kind, "tensors"), lambda rows: tuple(column[rows.to(column.device)] for column in columns), not own)
    if files := _files(dataset):
        return Stored((kind, "files"), lambda rows: [_file(*files[row]) for row in rows.tolist()], True)
    data, targets = _column(dataset, "data"), _column(dataset, "targets", "labels")
    if data is not None and targets is not None:
        return Stored((kind, "data"), lambda rows: (data[rows], targets[rows]), True)
    return None


def _tensors(dataset: Any) -> list[Tensor]:
    """Columns with a row for every sample."""
    columns, size = _shown(dataset, "tensors"), size_of(dataset)
    if not isinstance(columns, (tuple, list)) or not all(isinstance(column, Tensor) and column.dim() for column in columns):
        return []
    return list(columns) if all(len(column) == size for column in columns) else []


def _files(dataset: Any) -> list[tuple[str, Any]]:
    samples = _shown(dataset, "samples")
    if not isinstance(samples, list) or len(samples) != size_of(dataset):
        return []
    if not all(isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str) for sample in samples):
        return []
    return samples


def _file(path: str, label: Any) -> str:
    return f"{os.path.abspath(path)} {label}"


def _column(dataset: Any, *names: str) -> Tensor | None:
    for name in names:
        values = _shown(dataset, name)
        if isinstance(values, list) and {type(value) for value in values} == {int}:
            values = torch.tensor(values)
        if isinstance(values, numpy.ndarray) and values.dtype.kind in "biuf":
            values = torch.as_tensor(values)
        if isinstance(values, Tensor) and values.dim() and len(values) == size_of(dataset):
            return values
    return None


def _shown(dataset: Any, name: str) -> Any:
    try:
        return getattr(dataset, name, None)
    except Exception:  # a user's property, which nothing else needs
        return None
