"""Fingerprint samples by their bytes, inputs and labels, to see which of some samples are among others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from expunge.data.objective import Batch

Hashes = numpy.ndarray[Any, numpy.dtype[numpy.int64]]  # one per sample, Python's 64-bit hash of its bytes


SPREAD = 16  # numbers per sample, enough to distinguish most


class Unreadable(Exception):
    """A batch whose samples cannot be compared by bytes."""


class Matches(NamedTuple):
    """The size of a batch, the places of its known samples, their numbers there, and whether padding may hide others."""

    size: int
    places: Tensor
    numbers: Tensor
    padded: bool


class Fingerprints:
    """Known samples, to look others up among."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        columns = [_columns(batch) for batch in batches]
        self._forms = {_form(batch) for batch in columns}
        self._lengths = {length for batch in columns if (length := _tokens(batch)) is not None}
        self._light = numpy.concatenate([_light(batch) for batch in columns])
        largest = [_hashes(batch[-1]) for batch in columns]
        self._samples = _Sorted(numpy.concatenate([_sum(batch[:-1], inputs) for batch, inputs in zip(columns, largest, strict=True)]))
        self._inputs = _Sorted(numpy.concatenate(largest))

    def among(self, batch: Batch) -> Matches:
        """The samples of a batch that are among these, and their numbers here, the first where there are several.

        Labels and a few numbers of the inputs are looked up first: what they rule out is not hashed. Where labels have another form, or
        there are more or fewer entries beside the inputs, the inputs alone decide.
        """
        columns = _columns(batch)
        size, padded = len(columns[0]), (length := _tokens(columns)) is not None and self._lengths != {length}
        if _form(columns) not in self._forms:
            return Matches(size, *self._inputs.among(_hashes(columns[-1])), padded)
        places = torch.from_numpy(numpy.flatnonzero(numpy.isin(_light(columns), self._light)))
        within, numbers = self._samples.among(_sum([column[places.to(column.device)] for column in columns]))
        return Matches(size, places[within], numbers, padded)


class _Sorted:
    """Sorted hashes, for fast lookup."""

    def __init__(self, hashes: Hashes) -> None:
        self.order = numpy.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def among(self, hashes: Hashes) -> tuple[Tensor, Tensor]:
        """The places of the hashes that are among these, and their numbers here."""
        nearest = numpy.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        places = numpy.flatnonzero(self.hashes[nearest] == hashes)
        return torch.from_numpy(places), torch.from_numpy(self.order[nearest[places]])


def fingerprints(batch: Batch) -> Hashes:
    """One hash per sample, whatever the names and the order of the columns."""
    return _sum(_columns(batch))


def _columns(batch: Batch) -> list[Tensor]:
    """The columns of a batch, the smallest first; words by their hashes."""
    columns = [column for leaf in _parts(batch) if (column := _column(leaf)) is not None]
    sizes = {len(column) for column in columns}
    if len(sizes) != 1:
        raise Unreadable
    return sorted(columns, key=lambda column: column[:1].nbytes)


def _form(columns: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers per sample of every column."""
    return tuple(sorted(map(_width, columns)))


def _tokens(columns: Sequence[Tensor]) -> int | None:
    """How long the texts of a batch are: rows of whole numbers, which are padded to one length; None for other inputs."""
    inputs = columns[-1]
    return inputs.shape[1] if inputs.dim() == 2 and inputs.dtype in (torch.int32, torch.int64) else None


def _parts(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _parts(value)
    elif isinstance(batch, (tuple, list)) and not _words(batch):
        for value in batch:
            yield from _parts(value)
    else:
        yield batch


def has_bytes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested and not tensor.is_meta


def _words(entry: Any) -> bool:
    return bool(entry) and all(isinstance(word, (str, bytes)) for word in entry)


def _column(leaf: Any) -> Tensor | None:
    """None where a leaf says nothing of single samples, such as a setting that goes with a batch."""
    if leaf is None or isinstance(leaf, (bool, int, float, str, bytes)):
        return None
    if isinstance(leaf, (tuple, list)):
        return torch.tensor([hash(word) for word in leaf])
    if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf":
        leaf = torch.as_tensor(leaf)
    if not isinstance(leaf, Tensor) or not leaf.dim() or not has_bytes(leaf):
        raise Unreadable
    return leaf.detach()


def _sum(columns: Sequence[Tensor], *hashes: Hashes) -> Hashes:
    """Summed, which does not depend on the order of columns; numbers wrap around."""
    return numpy.sum([*map(_hashes, columns), *hashes], axis=0, dtype=numpy.int64)


def _light(columns: Sequence[Tensor]) -> Hashes:
    """Of the smallest column and of some numbers, here and there, of the largest."""
    rows = columns[-1].reshape(len(columns[-1]), _width(columns[-1]))
    spread = rows[:, torch.linspace(0, rows.shape[1] - 1, SPREAD).long().unique()] if rows.shape[1] > SPREAD else rows
    return _sum([columns[0], spread])


def _width(column: Tensor) -> int:
    return math.prod(column.shape[1:])


def _hashes(column: Tensor) -> Hashes:
    rows = column.reshape(len(column), _width(column)).cpu()
    if rows.is_floating_point():
        rows = rows.float() + 0.0  # the same numbers, whatever the precision they are kept in; -0.0 is 0.0
    elif not rows.is_complex() and rows.shape[1] == 1:
        rows = rows.long()  # a label
    array = rows.contiguous().numpy()
    return numpy.array([hash(row.tobytes()) for row in array], dtype=numpy.int64)
