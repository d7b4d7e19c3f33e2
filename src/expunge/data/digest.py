"""Identify the data of a dataset by a digest of its tensors, not of its samples, which random transforms may change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from expunge.data.indices import resolved, size_of, subset_rows
from expunge.errors import InputError
from expunge.storage.tensors import add_bytes

CHUNK = 64 << 20  # bytes taken at once, for the memory's sake; the digest does not depend on it
PLAIN = (str, bytes, bool, int, float, complex, type(None), numpy.generic)  # values whose repr is all of them


def data_digest(data: Any) -> str | None:
    """SHA-256 over the tensors that a dataset or a loader's dataset shows, in the order of its samples; None where it shows none.

    Shown are `tensors` (of a TensorDataset, or of our images) or else `targets` (where torchvision's datasets have their labels), with a
    row for every sample. A Subset counts by its own rows alone. No sample is read: random transforms and the order of a loader do
    not change the digest, nor does anything else in a dataset.
    """
    dataset = data.dataset if isinstance(data, DataLoader) else data
    digest = hashlib.sha256()
    try:
        return digest.hexdigest() if _add(digest, dataset, torch.arange(size_of(dataset) or 0)) else None
    except InputError:  # raised when the data are read, not here
        return None


def add_batch(digest: hashlib._Hash, batch: Any) -> None:
    """Add the types, shapes and bytes of all tensors of a batch, the names they have in mappings, and plain values beside them."""
    if isinstance(batch, Tensor):
        digest.update(f"{batch.dtype}|{tuple(batch.shape)}|".encode())
        add_bytes(digest, batch)
    elif isinstance(batch, numpy.ndarray) and not batch.dtype.hasobject:
        digest.update(f"{batch.dtype}|{batch.shape}|".encode())
        digest.update(batch.tobytes())
    elif isinstance(batch, Mapping):
        for name in sorted(batch, key=str):
            digest.update(f"{name!r}:".encode())
            add_batch(digest, batch[name])
    elif isinstance(batch, (tuple, list)):
        digest.update(f"{len(batch)} of|".encode())
        for part in batch:
            add_batch(digest, part)
    elif isinstance(batch, PLAIN):
        digest.update(f"{batch!r}|".encode())


def _add(digest: hashlib._Hash, dataset: Any, rows: Tensor) -> bool:
    """Add these rows of a dataset; False where it shows none."""
    size = size_of(dataset) or 0
    if not len(rows) or int(rows.min()) < -size or int(rows.max()) >= size:
        return False
    if isinstance(dataset, Subset):
        return _add(digest, dataset.dataset, subset_rows(dataset, "data")[rows])
    if isinstance(dataset, ConcatDataset):
        return _add_parts(digest, dataset, torch.where(rows < 0, rows + size, rows))
    columns = _columns(dataset, size)
    for column in columns:
        digest.update(f"{column.dtype}|{tuple(column.shape[1:])}|{len(rows)}|".encode())
        row_bytes = column[0].numel() * column.element_size()
        for chunk in rows.to(column.device).split(max(1, CHUNK // max(1, row_bytes))):
            add_bytes(digest, column[chunk])
    return bool(columns)


def _add_parts(digest: hashlib._Hash, dataset: ConcatDataset[Any], rows: Tensor) -> bool:
    ends = ConcatDataset.cumsum([resolved(part, "data") for part in dataset.datasets])
    parts = torch.bucketize(rows, torch.tensor(ends), right=True)
    add_bytes(digest, parts)  # how the rows of the parts follow each other
    datasets = zip(dataset.datasets, [0, *ends], strict=False)
    return any([_add(digest, inner, rows[parts == part] - start) for part, (inner, start) in enumerate(datasets)])


def _columns(dataset: Any, size: int) -> list[Tensor]:
    shown = _shown(dataset, "tensors")
    if not isinstance(shown, (tuple, list)):
        shown = [_numbers(_shown(dataset, "targets"))]
    return [column for column in shown if isinstance(column, Tensor) and _has_bytes(column) and column.dim() and len(column) == size]


def _shown(dataset: Any, name: str) -> Any:
    try:
        return getattr(dataset, name, None)
    except Exception:  # a user's property, which training does not need
        return None


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _numbers(labels: Any) -> Tensor | None:
    """Labels as a tensor; None for others, such as names."""
    try:
        return labels if isinstance(labels, Tensor) else torch.tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        return None
