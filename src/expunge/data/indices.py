"""Turn indices and masks into rows of a dataset; nothing else reads indices."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from expunge.errors import InputError

WHOLE = "must be whole numbers, or a boolean mask"
LARGEST = torch.iinfo(torch.int64).max


def rows_of(indices: Any, size: int | None, argument: str, what: str = "", mask: bool = True, from_end: bool = True) -> Tensor:
    """The rows, int64, that indices name in a dataset of `size` samples (None: it does not say).

    Whole numbers of any kind are rows, in their order; below zero they count from the end, unless `from_end` is false. A boolean mask with
    an entry for every sample names those where it is true. Numbers 0 and 1, one for every sample, are refused: they are a mask, not
    row 0 and row 1 over and over; torch itself took such uint8 tensors for a mask. `what` names the indices in an error.
    `mask=False` refuses masks.
    """
    if isinstance(indices, range):
        _check_inside([*indices[:1], *indices[-1:]], size, argument, what, from_end)
        return torch.arange(len(indices)) * indices.step + indices.start
    values = _numbers(indices, argument, what)
    if values.dtype == torch.bool:
        if not mask:
            raise InputError(argument, f"{what}must be whole numbers; give mask.nonzero().flatten() for a mask", "a boolean mask")
        if len(values) != size:
            entries = "a dataset with a length" if size is None else f"{size} entries, one for each sample"
            raise InputError(argument, f"{what}{WHOLE} of {entries}", f"a mask of {len(values)}")
        return values.nonzero().flatten()
    if len(values):
        _check_inside([int(values.min()), int(values.max())], size, argument, what, from_end)
        if len(values) == size and size > 2 and bool(((values == 0) | (values == 1)).all()):
            raise InputError(argument, f"{what}{WHOLE}; make the mask boolean", f"0 or 1 for each of the {size} samples")
    return values


def subset_rows(subset: Subset[Any], argument: str, mask: bool = True) -> Tensor:
    """The rows of a subset, all of them rows of its dataset."""
    return rows_of(subset.indices, size_of(subset.dataset), argument, "a Subset's indices ", mask)


def size_of(dataset: Any) -> int | None:
    """The number of samples of a dataset, for a Subset those of its mask; None where it has no length."""
    if isinstance(dataset, Subset) and _is_mask(dataset.indices):
        return len(subset_rows(dataset, "dataset"))
    if isinstance(dataset, ConcatDataset):
        sizes = [size_of(part) for part in dataset.datasets]
        return None if None in sizes else sum(size for size in sizes if size is not None)
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, ValueError):
        return None


def resolved(dataset: Any, argument: str) -> Any:
    """The dataset with every mask in its subsets and concatenations as rows, which torch can read; itself where there is none."""
    if isinstance(dataset, Subset):
        inner, rows = resolved(dataset.dataset, argument), subset_rows(dataset, argument)
        if inner is dataset.dataset and not _is_mask(dataset.indices):
            return dataset
        # A copy, since a user's class may have more attributes and make samples in its own way.
        return _changed(dataset, dataset=inner, indices=rows.tolist())
    if isinstance(dataset, ConcatDataset):
        parts = [resolved(part, argument) for part in dataset.datasets]
        if all(part is before for part, before in zip(parts, dataset.datasets, strict=True)):
            return dataset
        return _changed(dataset, datasets=parts, cumulative_sizes=ConcatDataset.cumsum(parts))
    check_unmasked(dataset, argument)
    return dataset


def check_unmasked(dataset: Any, argument: str, visited: frozenset[int] = frozenset()) -> None:
    """Refuse masks below a loader or a user's own dataset: these read subsets as torch does, which knows no masks."""
    if isinstance(dataset, Subset):
        subset_rows(dataset, argument, mask=False)
    for part in _inner_datasets(dataset):
        if id(part) not in visited:
            check_unmasked(part, argument, visited | {id(dataset)})


def _inner_datasets(dataset: Any) -> list[Dataset[Any]]:
    """The datasets that a dataset has as attributes, or in lists, tuples and mappings of them."""
    inner: list[Dataset[Any]] = []
    for value in getattr(dataset, "__dict__", {}).values() if isinstance(dataset, Dataset) else ():
        several = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        if isinstance(next(iter(several), None), Dataset):
            inner += [part for part in several if isinstance(part, Dataset)]
    return inner


def _changed(original: Dataset[Any], **attributes: Any) -> Dataset[Any]:
    changed = copy.copy(original)
    for name, value in attributes.items():
        setattr(changed, name, value)
    return changed


def _is_mask(indices: Any) -> bool:
    """By the first entry: what mixes truth values and rows is refused where it is read."""
    if isinstance(indices, (Tensor, numpy.ndarray)) and indices.dtype != object:
        return indices.dtype in (torch.bool, numpy.dtype(bool))
    return isinstance(indices, Iterable) and _is_truth(next(iter(indices), None))


def _numbers(indices: Any, argument: str, what: str) -> Tensor:
    """Indices as a tensor of one dimension, int64 or bool."""
    if isinstance(indices, (Tensor, numpy.ndarray)):
        if indices.ndim != 1:
            raise InputError(argument, f"{what}{WHOLE}, in one dimension", f"shape {tuple(indices.shape)}")
        return _from_tensor(indices, argument, what) if isinstance(indices, Tensor) else _from_array(indices, argument, what)
    if isinstance(indices, (str, bytes, Mapping)) or not isinstance(indices, Iterable):
        raise InputError(argument, f"{what}{WHOLE}", repr(indices)[:80])
    entries = list(indices)
    kinds = {type(entry) for entry in entries}
    if kinds == {Tensor} and len({(entry.dtype, entry.ndim) for entry in entries}) == 1 and not entries[0].ndim:
        return _numbers(torch.stack(entries), argument, what)
    truths = [kind for kind in kinds if issubclass(kind, (bool, numpy.bool_))]
    if truths or not all(issubclass(kind, (int, numpy.integer)) for kind in kinds):
        truths = [entry for entry in entries if _is_truth(entry)]
        if truths and len(truths) == len(entries):
            return torch.tensor([bool(entry) for entry in entries], dtype=torch.bool)
        if truths:
            raise InputError(argument, f"{what}{WHOLE}", "both in one list")
        entries = [_whole(entry, argument, what) for entry in entries]
    for end in (min(entries, default=0), max(entries, default=0)):
        if not -LARGEST <= end <= LARGEST:
            raise InputError(argument, f"{what}must be rows of its dataset", end)
    return torch.from_numpy(numpy.array(entries, dtype=numpy.int64))


def _from_tensor(indices: Tensor, argument: str, what: str) -> Tensor:
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
    if indices.dtype not in kinds or indices.layout is not torch.strided or indices.is_meta:
        raise InputError(argument, f"{what}{WHOLE}", f"a tensor of {indices.dtype}")
    plain = indices.detach().cpu()
    if plain.dtype in (torch.bool, torch.int64):
        return plain
    return _from_array(plain.numpy(), argument, what)


def _from_array(indices: numpy.ndarray[Any, Any], argument: str, what: str) -> Tensor:
    if indices.dtype.kind == "O":
        return _numbers(indices.tolist(), argument, what)
    if indices.dtype.kind not in "biu" or numpy.ma.is_masked(indices):
        raise InputError(argument, f"{what}{WHOLE}", f"an array of {indices.dtype}")
    if indices.dtype.kind == "u" and len(indices) and int(indices.max()) > LARGEST:
        raise InputError(argument, f"{what}must be rows of its dataset", int(indices.max()))
    return torch.from_numpy(indices.astype(bool if indices.dtype.kind == "b" else numpy.int64))


def _is_truth(entry: Any) -> bool:
    if isinstance(entry, (Tensor, numpy.ndarray)):
        return entry.ndim == 0 and entry.dtype in (torch.bool, numpy.dtype(bool))
    return isinstance(entry, (bool, numpy.bool_))


def _whole(entry: Any, argument: str, what: str) -> int:
    try:
        if getattr(entry, "ndim", 0):  # several rows, or one in brackets
            raise TypeError
        return operator.index(entry)
    except TypeError as error:
        raise InputError(argument, f"{what}{WHOLE}", repr(entry)[:80]) from error


def _check_inside(ends: list[int], size: int | None, argument: str, what: str, from_end: bool) -> None:
    """The smallest and the largest index, or the first and the last."""
    if size is None:
        return
    lowest = -size if from_end else 0
    for end in ends:
        if not lowest <= end < size:
            raise InputError(argument, f"{what}must be rows of its dataset of {size}" if what else f"must be in [{lowest}, {size})", end)
