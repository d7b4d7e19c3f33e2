"""Intervals: scipy's beta quantiles, plain loops, known answers, and how often they cover the truth."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from expunge.audit import intervals
from expunge.audit.intervals import (
    at_least_so_many,
    attack_rates,
    auc_interval,
    binomial,
    bootstrap_auc,
    bootstrap_difference,
    bootstrap_mean,
    clopper_pearson,
    tpr_at,
)
from expunge.errors import DivergedError, InputError


def plain_auc(members, others):
    return sum((a > b) + 0.5 * (a == b) for a in members for b in others) / (len(members) * len(others))


@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
@settings(max_examples=60, deadline=None)
def test_clopper_pearson_is_scipys_beta_quantile(trials, share, confidence):
    successes = round(share * trials)
    interval = clopper_pearson(successes, trials, confidence)
    tail = (1 - confidence) / 2
    low = 0 if successes == 0 else stats.beta.ppf(tail, successes, trials - successes + 1)
    high = 1 if successes == trials else stats.beta.ppf(1 - tail, successes + 1, trials - successes)
    assert interval.value == successes / trials
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-9)


def test_clopper_pearson_of_nothing_seen():
    interval = clopper_pearson(0, 100)
    assert interval.low == 0 and interval.high == pytest.approx(1 - 0.025**0.01, abs=1e-12)
    assert 0.03 in interval and 0.04 not in interval


@pytest.mark.parametrize(("least", "trials", "rate"), [(0, 5, 0.3), (6, 5, 0.3), (40, 60, 0.5), (7, 60, 0.5), (900, 50_000, 0.02)])
def test_shares_of_a_binomial_are_scipys(least, trials, rate):
    assert at_least_so_many(least, trials)(rate) == pytest.approx(stats.binom.sf(least - 1, trials, rate), abs=1e-10)
    assert binomial(trials, rate).numpy() == pytest.approx(stats.binom.pmf(range(trials + 1), trials, rate), rel=1e-8, abs=1e-300)


def test_bootstrap_of_a_mean_is_a_plain_loop_in_one_piece_and_in_many(monkeypatch):
    values = torch.rand(17, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    numbers = torch.Generator().manual_seed(3)
    means = [float(values[torch.randint(17, (1, 17), generator=numbers)[0]].mean()) for _ in range(50)]
    monkeypatch.setattr(intervals, "CELLS", 17)
    interval = bootstrap_mean(values, draws=50, seed=3)
    assert (interval.low, interval.high) == pytest.approx(tuple(numpy.quantile(means, [0.025, 0.975])), abs=1e-12)
    assert interval.value == pytest.approx(float(values.mean()))
    monkeypatch.setattr(intervals, "CELLS", 17 * 7)  # other pieces draw other rows: as close, not the same
    assert bootstrap_mean(values, draws=4000, seed=3).low == pytest.approx(bootstrap_mean(values, draws=4000, seed=4).low, abs=0.02)


def test_a_bootstrap_keeps_the_callers_random_numbers():
    before = torch.get_rng_state()
    bootstrap_mean([1.0, 2.0])
    bootstrap_auc([1.0, 2.0], [0.0, 3.0])
    assert torch.equal(before, torch.get_rng_state())


def test_differences_of_the_same_samples_are_narrower_where_paired():
    numbers = torch.Generator().manual_seed(0)
    hardness = torch.randn(200, generator=numbers) * 5
    first, second = hardness + 1, hardness + 0.1 * torch.randn(200, generator=numbers)
    paired, apart = (bootstrap_difference(first, second, paired=paired) for paired in (True, False))
    assert paired.value == pytest.approx(apart.value) and 1 in paired and 0 not in paired
    assert paired.high - paired.low < 0.1 < apart.high - apart.low
    with pytest.raises(InputError, match="second: must be as many as the 200"):
        bootstrap_difference(first, second[:3], paired=True)


def test_bootstrap_of_an_area_draws_members_and_others_apart():
    members, others = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 2.0, 3.0])
    interval = bootstrap_auc(members, others, draws=40, seed=2)
    numbers, areas = torch.Generator().manual_seed(2), []
    drawn_others = others[torch.randint(3, (40, 3), generator=numbers)]
    drawn_members = members[torch.randint(4, (40, 4), generator=numbers)]
    for some, rest in zip(drawn_members.tolist(), drawn_others.tolist(), strict=True):
        areas.append(plain_auc(some, rest))
    assert interval.value == pytest.approx(plain_auc(members.tolist(), others.tolist()))
    assert (interval.low, interval.high) == pytest.approx(tuple(numpy.quantile(areas, [0.025, 0.975])), abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["normal", "exponential"])
def test_intervals_of_an_area_cover_the_truth(shift, kind):
    """In 95 of 100 cases; 300 cases have a deviation of 1.3 points."""
    generator = numpy.random.default_rng(0)
    sample = generator.normal if kind == "normal" else generator.exponential
    truth = stats.norm.cdf(shift / 2**0.5) if kind == "normal" else 1 - numpy.exp(-shift) / 2
    covered = [truth in auc_interval(sample(size=40) + shift, sample(size=25)) for _ in range(300)]
    assert 0.91 <= numpy.mean(covered) <= 0.995


def test_an_area_of_one_has_a_width():
    few, more = (auc_interval(torch.ones(size), torch.zeros(size)) for size in (5, 500))
    assert few.value == few.high == 1 and 0.5 < few.low < 0.8 and 0.98 < more.low < 1
    mirrored = auc_interval(torch.zeros(5), torch.ones(5))
    assert (mirrored.low, mirrored.high) == pytest.approx((0, 1 - few.low))


def plain_tpr(rate, members, others):
    """Over all thresholds the largest share of members above one that no more than the rate of the others are above."""
    allowed = [t for t in (*others, -numpy.inf) if sum(score > t for score in others) <= rate * len(others) + 1e-9]
    return max(sum(score > t for score in members) / len(members) for t in allowed)


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.25, 0.29]))
@settings(max_examples=40, deadline=None)
def test_true_positives_never_exceed_the_rate_and_are_the_most_there_are(seed, rate):
    generator = numpy.random.default_rng(seed)
    members, others = generator.integers(0, 12, 30) + 3, generator.integers(0, 12, int(generator.integers(10, 60)))
    point = tpr_at(rate, members, others)
    assert point.true_positives.value == pytest.approx(plain_tpr(rate, members, others))
    assert point.false_positives.value <= rate + 1e-9
    assert point.true_positives == clopper_pearson(round(point.true_positives.value * 30), 30)


@pytest.mark.parametrize(("members", "others", "above"), [(30, 40, 0), (30, 40, 7), (30, 40, 30), (500, 2000, 90)])
def test_chance_is_scipys_hypergeometric(members, others, above):
    allowed = others // 10
    scores = torch.cat([torch.full((above,), 9.0), torch.full((members - above,), -9.0)])
    point = tpr_at(0.1, scores, torch.arange(others) / others)
    expected = stats.hypergeom.cdf(allowed, members + others, others, above + allowed)
    assert point.true_positives.value == above / members and point.chance == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_chance_is_below_5_percent_in_5_percent_of_cases_without_any_signal():
    """Where the interval of the true positives would call the asked rate too small in far more."""
    generator = numpy.random.default_rng(0)
    points = [tpr_at(0.1, generator.normal(size=400), generator.normal(size=100)) for _ in range(400)]
    assert 0.01 <= numpy.mean([point.chance <= 0.05 for point in points]) <= 0.075
    assert numpy.mean([point.true_positives.low > 0.1 for point in points]) > 0.1


def test_too_few_others_give_no_number():
    rates = attack_rates(torch.ones(50), torch.zeros(99))
    assert rates.at_percent is None and rates.at_permille is None and rates.area.value == 1
    rates = attack_rates(torch.ones(50), torch.zeros(100))
    assert rates.at_percent is not None and rates.at_percent.true_positives.value == 1 and rates.at_permille is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clopper_pearson(3, 2), "successes: must be a whole number of at least 0 and at most 2; found 3"),
        (lambda: clopper_pearson(0, 0), "trials"),
        (lambda: clopper_pearson(1, 2, 1.0), "confidence"),
        (lambda: bootstrap_mean([]), "values: must hold at least one sample"),
        (lambda: bootstrap_mean([1.0], draws=0), "draws"),
        (lambda: tpr_at(0.0, [1.0], [1.0]), "false_positive_rate"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_nan_is_no_score():
    with pytest.raises(DivergedError, match="others: 1 of 2 numbers are NaN"):
        attack_rates([1.0], [0.0, float("nan")])
