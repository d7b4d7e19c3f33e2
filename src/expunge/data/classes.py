"""Raise for objectives without classes where a softmax, an argmax or a random label is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.data.objective import Objective
from expunge.errors import InputError


def check_classes(objective: Objective, logits: torch.Size, why: str) -> None:
    """Require class logits, along dimension 1, of an objective that says so. `why` begins the error's sentence: "SCRUB needs"."""
    if len(logits) < 2 or logits[1] < 2:
        raise InputError("objective", f"{why} logits of shape (N, K, ...) with two classes or more", tuple(logits))
    check_class_logits(objective, why)


def check_class_logits(objective: Objective, why: str) -> None:
    if not objective.of_classes:
        rule = f"{why} class logits; give Objective(losses=..., classes=True) where dimension 1 of the outputs is the classes"
        raise InputError("objective", rule, f"classes={objective.classes} and a loss of one's own")


def no_labels(objective: Objective, logits: torch.Size | None, targets: Tensor) -> bool:
    """Whether targets are fractions, or one number per logit (multi-label): such values name no output of the head."""
    return objective.classes is False or targets.is_floating_point() or (logits is not None and targets.shape[1:] == logits[1:])
