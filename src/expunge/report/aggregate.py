"""Average numbers over seeds: the one place where a mean ± standard deviation is made."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Aggregate:
    """`mean` ± `sd` (of a sample: n − 1) over `count` values; None where there are too few, 0 for the mean and 0 or 1 for the sd."""

    mean: float | None
    sd: float | None
    count: int


def aggregate(values: Sequence[float]) -> Aggregate:
    return Aggregate(mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
