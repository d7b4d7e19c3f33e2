"""Read the labels of rows of a dataset, draw and check rows, and split them from the others."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from expunge.data.indices import resolved, rows_of, subset_rows
from expunge.errors import InputError
from expunge.validate import check_number


def readable(dataset: Any, argument: str = "dataset") -> Any:
    """The dataset with masks in its subsets as rows. Raises where it has no length, no items or no sample."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(argument, "must have a length and items", type(dataset).__name__)
    rows = resolved(dataset, argument)
    if len(rows) == 0:
        raise InputError(argument, "must not be empty")
    return rows


def length(dataset: Any) -> int:
    return len(readable(dataset))


def labels_of(dataset: Any) -> Tensor:
    """The label of every sample, int64 on the CPU, without reading its inputs where that can be avoided."""
    labels = torch.as_tensor(_labels(dataset)).cpu()
    if labels.dim() != 1 or labels.is_floating_point():
        raise InputError("dataset", "must hold one whole number as label per sample", f"{labels.dtype} {tuple(labels.shape)}")
    return labels.long()


def _labels(dataset: Any) -> Any:
    dataset = readable(dataset)
    size, makes_sample = len(dataset), type(dataset).__getitem__
    if isinstance(dataset, TensorDataset) and makes_sample is TensorDataset.__getitem__:
        return dataset.tensors[-1]
    if isinstance(dataset, Subset) and makes_sample is Subset.__getitem__:
        return labels_of(dataset.dataset)[subset_rows(dataset, "dataset")]
    if isinstance(dataset, ConcatDataset) and makes_sample is ConcatDataset.__getitem__:
        return torch.cat([labels_of(part) for part in dataset.datasets])
    targets = getattr(dataset, "targets", None)  # where torchvision's datasets and our views keep their labels
    if targets is not None and len(targets) == size and getattr(dataset, "target_transform", None) is None:
        return targets
    return [label_of(dataset[index]) for index in range(size)]


def label_of(sample: Any) -> int:
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise InputError("dataset", "samples must be (image, label)", type(sample).__name__)
    try:
        return operator.index(sample[-1])
    except TypeError as error:
        raise InputError("dataset", "must hold one whole number as label per sample", repr(sample[-1])[:80]) from error


def split(dataset: Dataset[Any], rows: Tensor) -> tuple[Subset[Any], Subset[Any]]:
    """These rows, and all others."""
    remaining = others(rows, length(dataset))
    if not remaining:
        raise InputError("dataset", "something must be left to keep", f"all {len(rows)} samples chosen")
    return Subset(dataset, rows.tolist()), Subset(dataset, remaining)


def others(rows: Tensor, size: int) -> list[int]:
    left = torch.ones(size, dtype=torch.bool)
    left[rows] = False
    return torch.nonzero(left).flatten().tolist()


def drawn(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` of the rows at random, in their original order."""
    return rows[torch.randperm(len(rows), generator=generator)[:count].sort().values]


def share(fraction: float, size: int) -> int:
    """A fraction of `size` samples, rounded: some of them and not all."""
    check_fraction(fraction)
    count = int(fraction * size + 0.5)
    if not 0 < count < size:
        raise InputError("fraction", f"must choose some and not all of {size} samples", fraction)
    return count


def check_fraction(fraction: float) -> None:
    check_number("fraction", fraction, 0, 1, ends="()")


def checked(indices: Any, size: int) -> Tensor:
    """Row numbers without repeats, also from a mask."""
    rows = rows_of(indices, size, "indices", from_end=False)
    if len(rows) == 0:
        raise InputError("indices", "must be row numbers, one or more", "none")
    values, counts = torch.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise InputError("indices", "must not name a sample twice", int(values[counts > 1][0]))
    return rows
