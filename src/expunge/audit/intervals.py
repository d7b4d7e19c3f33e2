"""Put error bars on a rate, a mean, a difference and an attack's curve, exact where that can be had."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy
import torch
from torch import Tensor

from expunge.errors import DivergedError, InputError
from expunge.metrics.membership import area_under_curve
from expunge.storage.codec import Number
from expunge.validate import check_number, check_seed, check_whole

CELLS = 2**22  # numbers of a bootstrap in memory at once, 32 MiB
HALVINGS = 60  # of an interval in [0, 1]: below the last digit of a float64


@dataclass(frozen=True)
class Interval:
    """A value, and the ends of its confidence interval; a sample so small that nothing can be said has ends far apart."""

    value: Number
    low: Number
    high: Number
    confidence: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """The exact interval of a rate k/n: all p with P(X ≥ k) > α/2 and P(X ≤ k) > α/2, X binomial of n and p, α = 1 − confidence.

    It covers the true rate in at least that share of cases, whatever n (Clopper and Pearson, 1934).
    """
    check_confidence(confidence)
    check_whole("trials", trials, minimum=1)
    check_whole("successes", successes, minimum=0, maximum=trials)
    tail = (1 - confidence) / 2
    at_least, more = at_least_so_many(successes, trials), at_least_so_many(successes + 1, trials)
    low = 0.0 if successes == 0 else _crossing(lambda rate: at_least(rate) > tail)
    high = 1.0 if successes == trials else _crossing(lambda rate: 1 - more(rate) <= tail)
    return Interval(successes / trials, low, high, confidence)


def at_least_so_many(least: int, trials: int) -> Callable[[float], float]:
    """P(X ≥ least) of X binomial, as a function of its rate within (0, 1), to 1e-15: the side of fewer counts is summed."""
    upper = trials - least < least
    counts = numpy.arange(least, trials + 1) if upper else numpy.arange(least)
    ways = _log_ways(trials, torch.from_numpy(counts)).numpy()

    def share(rate: float) -> float:
        total = float(numpy.exp(ways + counts * math.log(rate) + (trials - counts) * math.log1p(-rate)).sum())
        return total if upper else 1 - total

    return share


def binomial(trials: int, rate: float) -> Tensor:
    """P(X = count) of X binomial, for every count from 0 to `trials`, a rate within (0, 1)."""
    counts = torch.arange(trials + 1).double()
    return (_log_ways(trials, counts) + counts * math.log(rate) + (trials - counts) * math.log1p(-rate)).exp()


def _log_ways(size: int, chosen: Tensor) -> Tensor:
    """log of the number of ways to choose so many out of `size`."""
    chosen = chosen.double()
    return math.lgamma(size + 1) - torch.lgamma(chosen + 1) - torch.lgamma(size - chosen + 1)


def _crossing(reached: Callable[[float], bool]) -> float:
    """Where a condition that is false at 0 and true at 1 becomes true."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return (low + high) / 2


def bootstrap_mean(values: Any, draws: int = 2000, seed: int = 0, confidence: float = 0.95) -> Interval:
    """The mean, and percentiles of the means of `draws` samples drawn from the values with replacement."""
    values = as_scores("values", values)
    return _percentiles(float(values.mean()), torch.cat([*_means(values, draws, seed)]), confidence)


def bootstrap_difference(
    first: Any, second: Any, paired: bool = False, draws: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """mean(first) − mean(second); `paired` draws the same rows of both, as for two networks on the same samples."""
    first, second = as_scores("first", first), as_scores("second", second)
    if paired and len(first) != len(second):
        raise InputError("second", f"must be as many as the {len(first)} of first where they are paired", len(second))
    if paired:
        return bootstrap_mean(first - second, draws, seed, confidence)
    # Seeds apart: the same rows drawn of both would tie them together where they are as many.
    differences = torch.cat([*_means(first, draws, 2 * seed)]) - torch.cat([*_means(second, draws, 2 * seed + 1)])
    return _percentiles(float(first.mean() - second.mean()), differences, confidence)


def bootstrap_auc(members: Any, others: Any, draws: int = 2000, seed: int = 0, confidence: float = 0.95) -> Interval:
    """The area under the curve, members and others drawn with replacement apart from each other. See `auc_interval`.

    No resampling of scores that do not overlap makes them overlap: at 0 and 1 the interval is a point, and `auc_interval` must be used.
    """
    members, others = as_scores("members", members), as_scores("others", others)
    ranks = torch.unique(torch.cat([members, others]), return_inverse=True)[1]
    levels = int(ranks.max()) + 1
    member_ranks, other_ranks = ranks[: len(members)], ranks[len(members) :]
    areas = []
    numbers = torch.Generator().manual_seed(seed)
    for number in _pieces(draws, len(ranks) + levels):
        drawn = _drawn(other_ranks, number, numbers)
        counts = torch.zeros(number, levels, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        below = counts.cumsum(1) - counts / 2  # others below each level, those on it counted half
        areas.append(below.gather(1, _drawn(member_ranks, number, numbers)).mean(1) / len(others))
    return _percentiles(area_under_curve(members, others), torch.cat(areas), confidence)


def auc_interval(members: Any, others: Any, confidence: float = 0.95) -> Interval:
    """The area under the curve θ̂ and all θ with |θ̂ − θ| ≤ z·√V(θ) (Newcombe, 2006, method 5); also at 0 and 1, where it has a width.

    V(θ) = θ(1 − θ)·[1 + (N − 1)·((1 − θ)/(2 − θ) + θ/(1 + θ))] / mn, m members, n others, N = (m + n)/2, z the normal quantile.
    """
    check_confidence(confidence)
    members, others = as_scores("members", members), as_scores("others", others)
    return area_interval(area_under_curve(members, others), lambda theta: auc_variance(theta, len(members), len(others)), confidence)


def auc_variance(theta: float, members: Any, others: Any) -> Any:
    """V(θ) of `auc_interval`, of so many members and others, or of arrays of them."""
    spread = (1 - theta) / (2 - theta) + theta / (1 + theta)
    return theta * (1 - theta) * (1 + ((members + others) / 2 - 1) * spread) / (members * others)


def area_interval(area: float, variance_at: Callable[[float], float], confidence: float) -> Interval:
    """All θ within z·√V(θ) of the area."""
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)

    def near(theta: float) -> bool:
        return abs(area - theta) <= quantile * math.sqrt(variance_at(theta))

    low = 0.0 if area == 0 else _crossing(lambda theta: theta >= area or near(theta))
    high = 1.0 if area == 1 else _crossing(lambda theta: theta > area and not near(theta))
    return Interval(area, low, high, confidence)


@dataclass(frozen=True)
class OperatingPoint:
    """An attack at one threshold: of members the share above it, of others the share above it, each with its exact interval.

    `chance` is the exact probability of so many members above it where nothing tells members from others, the threshold being found on
    the same others: small means that the attack works. The intervals are for the threshold as it is, so that of the true positives may
    leave out the asked rate more often than in 5 % of cases where nothing tells them apart.
    """

    asked: float
    true_positives: Interval
    false_positives: Interval
    threshold: float
    chance: float


def tpr_at(false_positive_rate: float, members: Any, others: Any, confidence: float = 0.95) -> OperatingPoint | None:
    """The share of members above the lowest threshold that at most `false_positive_rate` of the others are above.

    None with fewer than 1 / rate others: a single one above the threshold would be too many, so such a rate cannot be told. Intervals are
    Clopper and Pearson's. With a members above the threshold of k + 1 others, chance = P(X ≤ k), X the others among a + k drawn from all.

    Departures: RULI's program takes the nearest rate there is; here the rate is never exceeded.
    """
    check_number("false_positive_rate", false_positive_rate, 0, 1, ends="()")
    check_confidence(confidence)
    members, others = as_scores("members", members), as_scores("others", others)
    allowed = math.floor(false_positive_rate * len(others) + 1e-9)
    if allowed < 1:
        return None
    threshold = others.sort(descending=True).values[allowed]
    above, wrong = (int((scores > threshold).sum()) for scores in (members, others))
    rates = clopper_pearson(above, len(members), confidence), clopper_pearson(wrong, len(others), confidence)
    chance = _few_others(allowed, above, len(members), len(others))
    return OperatingPoint(float(false_positive_rate), *rates, float(threshold), chance)


def _few_others(allowed: int, above: int, members: int, others: int) -> float:
    """P(X ≤ allowed), X hypergeometric: at most so many others among the first above + allowed of all, in random order."""
    counts, drawn = torch.arange(max(0, above + allowed - members), min(allowed, others) + 1), torch.tensor(above + allowed)
    terms = _log_ways(others, counts) + _log_ways(members, drawn - counts) - _log_ways(members + others, drawn)
    return min(1.0, float(terms.exp().sum()))


@dataclass(frozen=True)
class AttackRates:
    """How well scores tell members from others: 0.5 of the area is chance. A rate is None where the others are too few to tell it."""

    area: Interval
    at_percent: OperatingPoint | None
    at_permille: OperatingPoint | None
    members: int
    others: int


def attack_rates(members: Any, others: Any, confidence: float = 0.95) -> AttackRates:
    """The area under the curve and the true positives at 1 % and 0.1 % false positives of scores that are larger for members."""
    members, others = as_scores("members", members), as_scores("others", others)
    percent, permille = (tpr_at(rate, members, others, confidence) for rate in (0.01, 0.001))
    return AttackRates(auc_interval(members, others, confidence), percent, permille, len(members), len(others))


def as_scores(argument: str, values: Any) -> Tensor:
    """One number per sample, flat, float64, on the CPU; at least one, and no NaN (an infinite score is the strongest there is)."""
    scores = torch.as_tensor(values).detach().to("cpu", torch.float64).flatten()
    if not len(scores):
        raise InputError(argument, "must hold at least one sample")
    if broken := int(scores.isnan().sum()):
        raise DivergedError(f"{argument}: {broken} of {len(scores)} numbers are NaN; nothing was measured")
    return scores


def check_confidence(confidence: Any) -> None:
    check_number("confidence", confidence, 0, 1, ends="()")


def _means(values: Tensor, draws: int, seed: int) -> Iterator[Tensor]:
    check_whole("draws", draws, minimum=1)
    check_seed("seed", seed)
    numbers = torch.Generator().manual_seed(seed)
    for number in _pieces(draws, len(values)):
        yield _drawn(values, number, numbers).mean(1)


def _drawn(values: Tensor, number: int, numbers: torch.Generator) -> Tensor:
    """`number` rows, each as many of the values as there are, with replacement."""
    return values[torch.randint(len(values), (number, len(values)), generator=numbers)]


def _pieces(draws: int, width: int) -> Iterator[int]:
    """How many draws at a time, so that memory does not grow with their number."""
    size = max(1, CELLS // width)
    yield from (min(size, draws - start) for start in range(0, draws, size))


def _percentiles(value: float, drawn: Tensor, confidence: float) -> Interval:
    check_confidence(confidence)
    ends = torch.quantile(drawn, torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64))
    return Interval(value, float(ends[0]), float(ends[1]), confidence)
