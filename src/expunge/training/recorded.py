"""Schedule the learning rate as it was in a training that is over: rates that were read off, with straight lines between."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from expunge.errors import InputError
from expunge.validate import MAX_EPOCHS, check_amount, check_whole, make_plain, shown

POINTS = 1000  # at most, of a long training


@dataclass(frozen=True, repr=False)
class Recorded:
    """rate(i · epochs / n) = rates[i] for n rates, straight lines between them, and the last one until the end.

    With a rate for every step of a training this is its schedule to the step.
    """

    rates: tuple[float, ...]
    epochs: int

    def __post_init__(self) -> None:
        if not isinstance(self.rates, (tuple, list)) or not self.rates:
            raise InputError("rates", "must be a tuple of learning rates, one at least", shown(self.rates))
        for rate in self.rates:
            check_amount("rates", rate)
        check_whole("epochs", self.epochs, minimum=1, maximum=MAX_EPOCHS)
        make_plain(self)
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))

    def rate(self, time: float) -> float:
        place = min(max(time * len(self.rates) / self.epochs, 0.0), len(self.rates) - 1.0)
        low = min(int(place), len(self.rates) - 1)
        high = min(low + 1, len(self.rates) - 1)
        return self.rates[low] + (place - low) * (self.rates[high] - self.rates[low])

    def __repr__(self) -> str:
        which = hashlib.sha256(repr(self.rates).encode()).hexdigest()[:8]  # as long as they are, two must not look alike
        return f"Recorded({len(self.rates)} rates up to {max(self.rates):g} ({which}), epochs={self.epochs})"


def thinned(rates: Sequence[float]) -> tuple[float, ...]:
    """At most 1,000 of the rates, at even distances."""
    number = min(len(rates), POINTS)
    return tuple(float(rates[step * len(rates) // number]) for step in range(number))
