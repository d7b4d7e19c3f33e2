"""Say how far a further network may lie from the retrained ones, by Student's distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

HALVINGS = 200


def student_share(value: float, freedom: int) -> float:
    """P(|T| ≤ value) of Student's distribution with so many degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(value, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = total = (cosine if odd else 1.0) if freedom > 1 else 0.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def student_quantile(share: float, freedom: int) -> float:
    """The value with P(|T| ≤ value) = share."""
    low, high = 0.0, 1.0
    while student_share(high, freedom) < share:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, freedom) < share else (low, middle)
    return high


def spread(values: Sequence[float]) -> float:
    """The standard deviation, with n − 1."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def reach(values: Sequence[float], level: float, networks: int | None = None) -> float:
    """The half-width of the prediction interval for one more value like these: t·s·√(1 + 1/m), t of m − 1 degrees of freedom.

    m is the number of values or, where they are of pairs, of `networks`: pairs of the same networks are not independent.
    """
    count = len(values) if networks is None else networks
    return student_quantile(1 - level, count - 1) * spread(values) * math.sqrt(1 + 1 / count)
