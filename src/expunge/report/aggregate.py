"""Average numbers over seeds: mean ± standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Aggregate:
    """`mean` ± `sd` (with n − 1) over `count` values; `mean` is None for no value, `sd` for fewer than two."""

    mean: float | None
    sd: float | None
    count: int


def aggregate(values: Sequence[float]) -> Aggregate:
    return Aggregate(mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
