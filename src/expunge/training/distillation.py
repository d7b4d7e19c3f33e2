"""Set how a student learns from a teacher's answers beside the labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expunge.errors import InputError
from expunge.validate import check_number, check_whole, make_plain, shown

COLDEST, HOTTEST = 1e-4, 1e4  # temperatures at which float32 still holds T² and the logits over T


@dataclass(frozen=True)
class Distillation:
    """(1 − α)·L(z, y) + α·T²·KL(softmax(t/T) ‖ softmax(z/T)), z the student's logits and t the teacher's: Hinton et al. 2015, 1503.02531.

    `temperature` T, `weight` α. `without` are classes that must not be taught; None: labels of the forget data that no remain sample has.
    Their logits are taken out of both softmaxes, so that the labels alone say what becomes of them, as they do where a network is trained
    without such a class. (Out of the teacher's alone, probability 0 at a temperature of 4 drives the student's logit four times as far
    down.)
    """

    temperature: float = 4.0
    weight: float = 0.9
    without: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, COLDEST, HOTTEST, ends="[]")
        check_number("weight", self.weight, 0, 1, ends="[]")
        object.__setattr__(self, "without", _checked_classes(self.without))
        make_plain(self)


def divergence(teacher: Tensor, student: Tensor, temperature: float, counted: Tensor | None = None) -> Tensor:
    """KL(softmax(teacher/T) ‖ softmax(student/T)) of each sample, summed over its positions where logits are (N, K, ...).

    `counted` (N, ...) says which positions count; None: all.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    goal, answer = ((logits.to(wide) / temperature).log_softmax(1) for logits in (teacher, student))
    parts = goal.exp() * (goal - answer)
    return (parts if counted is None else parts.masked_fill(~counted.unsqueeze(1), 0)).flatten(1).sum(1)


def _checked_classes(classes: Any) -> tuple[int, ...] | None:
    if classes is None:
        return None
    if not isinstance(classes, (tuple, list)):
        raise InputError("without", "must be a tuple of labels, or None", shown(classes))
    for label in classes:
        check_whole("without", label, minimum=0)
    return tuple(map(int, classes))
