"""Schedule the learning rate, and replay a schedule in fewer epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from expunge.errors import InputError
from expunge.validate import MAX_EPOCHS, check_amount, check_number, check_positive, check_whole, make_plain, plain_number, shown


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
        check_positive("base", self.base)
        _check_epochs(self.epochs)
        make_plain(self)

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
        check_positive("base", self.base)
        check_positive("factor", self.factor)
        _check_epochs(self.epochs)
        if not isinstance(self.decays, (tuple, list)):
            raise InputError("decays", "must be a tuple of epochs", shown(self.decays))
        for decay in self.decays:
            check_amount("decays", decay)
        check_amount("warmup", self.warmup)
        make_plain(self)
        object.__setattr__(self, "decays", tuple(map(plain_number, self.decays)))

    def rate(self, time: float) -> float:
        if time < self.warmup:
            return self.base * time / self.warmup
        # A replayed time is a product of floats: without the margin 2.5 epochs could miss their decay by one step.
        passed = sum(1 for decay in self.decays if time >= decay - 1e-9 * self.epochs)
        return self.base * self.factor**passed


@dataclass(frozen=True)
class OneCycle:
    """One rise and one fall: from 0 to `peak` over the share `rise` of the epochs, then straight back to 0.

    A few epochs from fresh weights take a large rate, and end well only where it has come down.
    """

    peak: float = 0.1
    epochs: int = 5
    rise: float = 0.15

    def __post_init__(self) -> None:
        check_positive("peak", self.peak)
        _check_epochs(self.epochs)
        check_number("rise", self.rise, 0, 1)
        make_plain(self)

    def rate(self, time: float) -> float:
        top = self.rise * self.epochs
        return self.peak * (time / top if time < top else (self.epochs - time) / (self.epochs - top))


@dataclass(frozen=True)
class Replay:
    """rate(t) = schedule.rate(t · schedule.epochs / epochs): every decay at the same fraction of the training.

    Section Fine-Tuning of the paper, S = `epochs`. Evaluated at every iteration, so Steps() in 5 epochs decays at 2.5 and 3.75.
    """

    schedule: Schedule
    epochs: int = 5

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        _check_epochs(self.epochs)
        make_plain(self)

    def rate(self, time: float) -> float:
        return self.schedule.rate(time * self.schedule.epochs / self.epochs)


def replay(schedule: Schedule, epochs: int = 5) -> Replay:
    """The original schedule compressed to fewer epochs."""
    return Replay(schedule, epochs)


def check_schedule(schedule: Schedule) -> None:
    """Require one of the above, or any object with `epochs` and a callable `rate`."""
    if isinstance(schedule, type) or not hasattr(schedule, "epochs") or not callable(getattr(schedule, "rate", None)):
        rule = "must be a schedule of learning rates with epochs and a rate, such as Constant(0.01, epochs=5)"
        raise InputError("schedule", rule, shown(schedule))
    check_whole("schedule", schedule.epochs, minimum=1, maximum=MAX_EPOCHS)


def _check_epochs(epochs: int) -> None:
    check_whole("epochs", epochs, minimum=1, maximum=MAX_EPOCHS)
