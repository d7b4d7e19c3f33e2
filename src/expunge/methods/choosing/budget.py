"""Keep within so many epochs and seconds, and never start what will not fit."""

from __future__ import annotations

import math

from expunge.training.keeping import clock

MARGIN = 1.2  # an epoch may take longer than the few steps that were timed


class Budget:
    """What is left of the epochs and of the seconds; None is without end.

    `epoch_seconds` and `pass_seconds`, of a Fisher pass, are as they were timed; 0: not yet.
    """

    def __init__(self, epochs: float | None, seconds: float | None) -> None:
        self.epochs, self.seconds = epochs, seconds
        self.began = clock()
        self.epoch_seconds = self.pass_seconds = 0.0

    def spend(self, epochs: float) -> None:
        if self.epochs is not None:
            self.epochs = max(0.0, self.epochs - epochs)

    def timed(self, step_seconds: float, steps: int) -> None:
        """Note what a step takes, of so many in an epoch."""
        if math.isfinite(step_seconds):
            self.epoch_seconds = MARGIN * step_seconds * steps

    def epochs_left(self, passes: int, measuring: float) -> float:
        """How many epochs can still be trained, beside other passes over the data and some seconds of measuring."""
        by_epochs = math.inf if self.epochs is None else self.epochs - passes
        if self.seconds is None:
            return by_epochs
        seconds = self.seconds - (clock() - self.began) - passes * self.pass_seconds - measuring
        return min(by_epochs, seconds / self.epoch_seconds if self.epoch_seconds else math.copysign(math.inf, seconds))

    def needed(self, room: float) -> float:
        """The seconds that would have been enough for an epoch where there is room for less."""
        return (self.seconds or 0.0) + (1 - room) * self.epoch_seconds
