"""Learning-rate schedules, and their replay in fewer epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from expunge.errors import InputError


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(argument: str, value: float) -> None:
    if not _is_number(value) or value <= 0:
        raise InputError(argument, "must be a positive number", value)


def _check_epochs(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError("epochs", "must be a whole number, 1 or more", value)


class Schedule(Protocol):
    """A learning rate for every moment of a training of `epochs` epochs; time is counted in epochs."""

    @property
    def epochs(self) -> int: ...

    def rate(self, time: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same rate throughout."""

    base: float
    epochs: int

    def __post_init__(self) -> None:
        _check_positive("base", self.base)
        _check_epochs(self.epochs)

    def rate(self, time: float) -> float:
        return self.base


@dataclass(frozen=True)
class Steps:
    """rate(t) = base · factor^#{d in decays : d ≤ t}, after a linear rise over the first `warmup` epochs.

    The defaults are the paper's training on CIFAR and Tiny-ImageNet (section Experiment, Hyperparameters).
    """

    base: float = 0.1
    epochs: int = 160
    decays: tuple[float, ...] = (80, 120)
    factor: float = 0.1
    warmup: float = 0

    def __post_init__(self) -> None:
        _check_positive("base", self.base)
        _check_positive("factor", self.factor)
        _check_epochs(self.epochs)
        if not isinstance(self.decays, (tuple, list)) or not all(_is_number(decay) and decay >= 0 for decay in self.decays):
            raise InputError("decays", "must be a tuple of epochs, numbers of 0 or more", self.decays)
        if not _is_number(self.warmup) or self.warmup < 0:
            raise InputError("warmup", "must be a number of epochs, 0 or more", self.warmup)

    def rate(self, time: float) -> float:
        if time < self.warmup:
            return self.base * time / self.warmup
        # A replayed time is a product of floats: without the margin 2.5 epochs could miss their decay by one step.
        passed = sum(1 for decay in self.decays if time >= decay - 1e-9 * self.epochs)
        return self.base * self.factor**passed


@dataclass(frozen=True)
class Replay:
    """rate(t) = schedule.rate(t · schedule.epochs / epochs): every decay at the same fraction of the training.

    Section Fine-Tuning of the paper, S = `epochs`. Evaluated at every iteration, so Steps() in 5 epochs decays at 2.5 and 3.75.
    """

    schedule: Schedule
    epochs: int = 5

    def __post_init__(self) -> None:
        if isinstance(self.schedule, type) or not hasattr(self.schedule, "epochs") or not callable(getattr(self.schedule, "rate", None)):
            raise InputError("schedule", "must have epochs and a rate, such as Steps()", self.schedule)
        _check_epochs(self.epochs)

    def rate(self, time: float) -> float:
        return self.schedule.rate(time * self.schedule.epochs / self.epochs)


def replay(schedule: Schedule, epochs: int = 5) -> Replay:
    """The original schedule compressed to fewer epochs."""
    return Replay(schedule, epochs)
