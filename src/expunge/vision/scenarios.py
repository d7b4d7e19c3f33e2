"""What to forget: a dataset split into a forget and a remain part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from expunge.errors import InputError


class Scenario(NamedTuple):
    """Two views of one dataset that share no sample."""

    forget: Subset[Any]
    remain: Subset[Any]


def category(dataset: Dataset[Any], label: int) -> Scenario:
    """Forget every sample of one class (section Remove A Full Category)."""
    labels = labels_of(dataset)
    chosen = labels == label
    if not chosen.any():
        raise InputError("label", "must occur in the dataset", label)
    if chosen.all():
        raise InputError("label", "must leave other classes to keep", label)
    return Scenario(Subset(dataset, torch.nonzero(chosen).flatten().tolist()), Subset(dataset, torch.nonzero(~chosen).flatten().tolist()))


def labels_of(dataset: Any) -> Tensor:
    """The label of every sample, without reading its inputs where that can be avoided."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    targets = getattr(dataset, "targets", None)  # where torchvision's datasets keep their labels
    if targets is not None and len(targets) == len(dataset):
        return torch.as_tensor(targets)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError("dataset", "must have a length and items", type(dataset).__name__)
    return torch.as_tensor([int(dataset[index][-1]) for index in range(len(dataset))])
