"""Read all labels of data."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.data.batches import Data
from expunge.data.labels import IGNORED, as_labels
from expunge.errors import InputError
from expunge.methods.context import Run


def labels_of(data: Data, argument: str, run: Run) -> Tensor:
    """One label per sample (or several, one per position), in the order in which they are read."""
    parts: list[Tensor] = []
    for batch in run.batches(data, argument):
        targets = run.objective.targets(batch)
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
            raise InputError(argument, "labels must be integers, for a method to be chosen; give a method", _form(targets))
        parts.append(as_labels(targets).cpu())
        shapes = [tuple(part.shape[1:]) for part in (parts[0], parts[-1])]
        if shapes[0] != shapes[1]:
            rule = f"must have labels of one shape, for a method to be chosen; pad them with {IGNORED}, or give a method"
            raise InputError(argument, rule, f"{shapes[1]} after {shapes[0]}")
    return torch.cat(parts)


def _form(targets: object) -> str:
    return f"{targets.dtype} of shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
