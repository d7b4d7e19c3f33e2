"""Rows of a dataset: their labels, drawn at random, checked, and split from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from expunge.errors import InputError
from expunge.settings import check_number


def length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError("dataset", "must have a length and items", type(dataset).__name__)
    if len(dataset) == 0:
        raise InputError("dataset", "must not be empty")
    return len(dataset)


def labels_of(dataset: Any) -> Tensor:
    """The label of every sample, int64 on the CPU, without reading its inputs where that can be avoided."""
    labels = torch.as_tensor(_labels(dataset)).cpu()
    if labels.dim() != 1 or labels.is_floating_point():
        raise InputError("dataset", "must hold one whole number as label a sample", f"{labels.dtype} {tuple(labels.shape)}")
    return labels.long()


def _labels(dataset: Any) -> Any:
    size, makes_sample = length(dataset), type(dataset).__getitem__
    if isinstance(dataset, TensorDataset) and makes_sample is TensorDataset.__getitem__:
        return dataset.tensors[-1]
    if isinstance(dataset, Subset) and makes_sample is Subset.__getitem__:
        return labels_of(dataset.dataset)[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset) and makes_sample is ConcatDataset.__getitem__:
        return torch.cat([labels_of(part) for part in dataset.datasets])
    targets = getattr(dataset, "targets", None)  # where torchvision's datasets and our views keep their labels
    if targets is not None and len(targets) == size and getattr(dataset, "target_transform", None) is None:
        return targets
    return [label_of(dataset[index]) for index in range(size)]


def label_of(sample: Any) -> int:
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise InputError("dataset", "samples must be (image, label)", type(sample).__name__)
    return int(sample[-1])


def split(dataset: Dataset[Any], rows: Tensor) -> tuple[Subset[Any], Subset[Any]]:
    """These rows, and all others."""
    rest = others(rows, length(dataset))
    if not rest:
        raise InputError("dataset", "something must be left to keep", f"all {len(rows)} samples chosen")
    return Subset(dataset, rows.tolist()), Subset(dataset, rest)


def others(rows: Tensor, size: int) -> list[int]:
    left = torch.ones(size, dtype=torch.bool)
    left[rows] = False
    return torch.nonzero(left).flatten().tolist()


def drawn(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many of the rows, at random, in the order they had."""
    return rows[torch.randperm(len(rows), generator=generator)[:count].sort().values]


def share(fraction: float, size: int) -> int:
    """A fraction of so many samples, rounded: some of them and not all."""
    check_fraction(fraction)
    count = int(fraction * size + 0.5)
    if not 0 < count < size:
        raise InputError("fraction", f"must choose some and not all of {size} samples", fraction)
    return count


def check_fraction(fraction: float) -> None:
    check_number("fraction", fraction, 0, 1, ends="()")


def checked(indices: Sequence[int], size: int) -> Tensor:
    """Row numbers, each of them once."""
    rows = torch.as_tensor(list(indices))
    if rows.dim() != 1 or len(rows) == 0:
        raise InputError("indices", "must be row numbers, one or more", "none" if rows.numel() == 0 else f"shape {tuple(rows.shape)}")
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise InputError("indices", "must be whole numbers", rows.dtype)
    outside = rows[(rows < 0) | (rows >= size)]
    if len(outside):
        raise InputError("indices", f"must be in [0, {size})", int(outside[0]))
    values, counts = torch.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise InputError("indices", "must not name a sample twice", int(values[counts > 1][0]))
    return rows
