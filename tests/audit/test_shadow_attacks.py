"""Attacks by shadows: the programs' formulas as plain loops on the same logits, known answers, laws."""

from __future__ import annotations

import math
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.neighbors import KernelDensity

from expunge.audit.membership import confidence
from expunge.audit.shadow_attacks import (
    ShadowSignals,
    epsilons,
    forgetting_quality,
    method_rates,
    ruli,
    target_rates,
    u_lira,
    vulnerability,
)
from expunge.audit.shadows import memberships
from expunge.errors import DivergedError, InputError


def made(shadows=12, samples=30, memory=2.0, left=1.0, seed=0, floor=None):
    """Signals of made-up logits: training on a sample adds `memory` to its logit, unlearning leaves `left` of that."""
    numbers = torch.Generator().manual_seed(seed)
    members = torch.stack([torch.randperm(shadows, generator=numbers) < shadows // 2 for _ in range(samples)], 1)
    labels = torch.randint(4, (samples,), generator=numbers)
    logits = torch.randn(samples, 4, generator=numbers) + torch.randn(shadows, samples, 4, generator=numbers)
    own = torch.nn.functional.one_hot(labels, 4) * members[..., None]
    signals = [confidence(logits + part * memory * own, labels, floor) for part in (1.0, left)]
    return ShadowSignals(*signals, members)


def test_u_lira_is_the_programs_probability():
    shadows, target = made(), torch.linspace(-4, 4, 30, dtype=torch.float64)
    for index, score in enumerate(u_lira(target, shadows).tolist()):
        signals, members, z = shadows.unlearned[:, index].numpy(), shadows.members[:, index].numpy(), float(target[index])
        forgotten, never = (stats.norm.pdf(z, part.mean(), part.std()) for part in (signals[members], signals[~members]))
        assert 1 / (1 + math.exp(-score)) == pytest.approx(forgotten / (forgotten + never), abs=1e-9)


@pytest.mark.parametrize("kind", ["privacy", "efficacy"])
def test_ruli_is_the_programs_probability(kind):
    shadows, target = made(memory=6.0, left=0.4, floor=1e-6), torch.linspace(-6, 6, 30, dtype=torch.float64)
    for index, score in enumerate(ruli(target, shadows, kind).tolist()):
        members, z = shadows.members[:, index].numpy(), [[float(target[index])]]
        outside = (shadows.unlearned if kind == "privacy" else shadows.trained)[:, index].numpy()[~members]
        fits = [KernelDensity(kernel="gaussian").fit(part[:, None]) for part in (shadows.unlearned[:, index].numpy()[members], outside)]
        forgotten, never = (numpy.exp(fit.score_samples(z))[0] for fit in fits)
        assert 1 / (1 + math.exp(-score)) == pytest.approx(forgotten / (forgotten + never), abs=1e-9)


def test_ratios_do_not_saturate():
    """Both densities are 0 in float64, and their ratio still has a sign."""
    shadows = made()
    assert u_lira(torch.full((30,), 1e5), shadows).isfinite().all() and ruli(torch.full((30,), 200.0), shadows).isfinite().all()


@pytest.mark.parametrize("score", [u_lira, ruli])
def test_methods_that_leave_everything_are_found_and_those_that_leave_nothing_are_not(score):
    kept, gone = (method_rates(made(24, 200, 3.0, left, seed=5), score) for left in (1.0, 0.0))
    assert kept.area.low > 0.8 and kept.at_percent.chance < 1e-9
    assert 0.47 < gone.area.value < 0.53


def test_a_method_is_attacked_by_shadows_that_do_not_know_the_target():
    shadows = made(10, 40)
    pairs = []
    for number in range(10):
        rest = [other for other in range(10) if other != number]
        others = ShadowSignals(shadows.trained[rest], shadows.unlearned[rest], shadows.members[rest])
        pairs += zip(u_lira(shadows.unlearned[number], others).tolist(), shadows.members[number].tolist(), strict=True)
    own, rest = ([score for score, member in pairs if member is kind] for kind in (True, False))
    expected = sum((a > b) + 0.5 * (a == b) for a in own for b in rest) / len(own) / len(rest)
    assert method_rates(shadows).area.value == pytest.approx(expected)


@pytest.mark.parametrize("score", [u_lira, ruli])
def test_few_shadows_in_pairs_find_nothing_where_there_is_nothing(score):
    """With the target alone left out, U-LiRA has an area of 0.436 here: members look less like members than others do."""
    members = memberships(8, 2000, seed=1)
    noise = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0))
    assert method_rates(ShadowSignals(noise, noise, members), score).area.value == pytest.approx(0.5, abs=0.012)


def test_one_network_is_audited_on_what_it_forgot_against_what_it_never_saw():
    shadows = made(30, 400, memory=3.0)
    rates = target_rates(u_lira(shadows.unlearned[0], shadows.without(0)), shadows.members[0])
    assert rates.area.low > 0.7 and rates.members + rates.others == 400
    with pytest.raises(InputError, match="forgotten: must be boolean, one for each of the 400 scores"):
        target_rates(torch.zeros(400), torch.zeros(3, dtype=torch.bool))


def test_signals_by_what_a_shadow_did_with_a_sample():
    shadows = made(6, 5)
    for index in range(5):
        members = shadows.members[:, index]
        assert torch.equal(shadows.forgotten[:, index], shadows.unlearned[members, index])
        assert torch.equal(shadows.retrained[:, index], shadows.trained[~members, index])
    members = torch.tensor([[1, 1], [1, 1], [0, 1], [0, 0], [0, 0]]).bool()
    with pytest.raises(InputError, match="members: every sample must be in as many shadows as any other; found 2 to 3"):
        _ = ShadowSignals(torch.zeros(5, 2), torch.zeros(5, 2), members).forgotten


def test_vulnerable_samples_are_those_that_training_shows_on():
    shadows = made(200, 3, memory=0.0)
    trained = shadows.trained + torch.tensor([0.0, 3.0, 9.0]) * shadows.members
    scores = vulnerability(ShadowSignals(trained, trained, shadows.members))
    inside, outside = trained[:, 2][shadows.members[:, 2]].numpy(), trained[:, 2][~shadows.members[:, 2]].numpy()
    assert float(scores[2]) == pytest.approx(abs(inside.mean() - outside.mean()) / (inside.std() + outside.std()))
    assert scores[0] < scores[1] < scores[2]


def program_epsilon(positive, negative, delta=1e-5):
    """One sample and 16 networks, as the challenge's program goes: all thresholds, all rates."""
    attacks = []
    narrow, wide = (positive, negative) if numpy.ptp(positive) < numpy.ptp(negative) else (negative, positive)
    if numpy.ptp(narrow) / numpy.ptp(wide) < 0.01:
        return 50.0
    width = numpy.ptp(narrow)
    start, end = narrow.min() + width - 2.0, narrow.max() + 2.0
    for right in numpy.linspace(start, end, int(numpy.ceil((end - start) * 100))):
        left = numpy.linspace(right - width - 2.0, right - width + 2.0, 400)[:, None]
        inside = [((left <= part) & (part <= right)).mean(1) for part in (narrow, wide)]
        attacks += {*zip(((1 - inside[0]) * 16).round(), (inside[1] * 16).round(), strict=True)}
    least, largest = min(positive.min(), negative.min()), max(positive.max(), negative.max())
    for threshold in numpy.linspace(least, largest, int(numpy.ceil((largest - least) * 100))):
        attacks.append((float((positive < threshold).sum()), float((negative >= threshold).sum())))
    best = math.nan
    for fnr, fpr in {(missed / 16, wrong / 16) for missed, wrong in attacks}:
        if fnr == fpr == 0:
            return 50.0
        if fnr * fpr == 0:
            continue
        values = [math.log(top / bottom) for top, bottom in ((1 - delta - fpr, fnr), (1 - delta - fnr, fpr)) if top > 0]
        for value in values:
            best = max(value, 0.0, 0.0 if math.isnan(best) else best)
    return min(best, 50.0)


@given(st.integers(0, 10**6))
@settings(max_examples=6, deadline=None)
def test_epsilon_is_the_programs(seed):
    generator = numpy.random.default_rng(seed)
    unlearned = generator.normal(generator.normal(), generator.uniform(0.3, 3), (16, 3))
    retrained = generator.normal(0, 1, (16, 3))
    expected = []
    for own, other in zip(unlearned.T, retrained.T, strict=True):
        swapped = numpy.median(other) > numpy.median(own)
        expected.append(program_epsilon(other, own) if swapped else program_epsilon(own, other))
    assert epsilons(torch.tensor(unlearned), torch.tensor(retrained)).numpy() == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_epsilon_of_known_cases():
    same = torch.linspace(-1, 1, 20, dtype=torch.float64)
    columns = [(same, same), (same, same + 10), (same, 0.001 * same), (same, 0.2 * same)]
    unlearned, retrained = (torch.stack(part, 1) for part in zip(*columns, strict=True))
    found = epsilons(unlearned, retrained).tolist()
    assert found[0] < 0.7 and found[1:3] == [50, 50]
    # Of the wide distribution 4 of 20 lie within the narrow one's range; one of the narrow is left outside to have no rate of 0.
    assert 1.0 < found[3] < math.log(20)


def test_quality_is_the_programs_buckets():
    values = [0.0, 0.49, 0.5, 0.99, 1.0, 3.99, 4.0, 50.0]
    points, start, worth = {}, 0.0, 1.0
    while start + 0.5 <= math.ceil(math.log(50 - 1)):
        points[start], start, worth = worth, start + 0.5, worth / 2
    expected = sum(next((worth for start, worth in points.items() if value < start + 0.5), 0.0) for value in values) / len(values)
    quality = forgetting_quality(torch.tensor([*values, math.nan]), networks=50)
    assert quality.score.value == pytest.approx(expected) and (quality.samples, quality.undecided) == (8, 1)
    assert quality.score.low <= expected <= quality.score.high
    assert forgetting_quality(torch.zeros(5), 512).score.value == 1 and forgetting_quality(torch.full((5,), 50.0), 512).score.value == 0


def test_too_few_networks_cannot_tell_an_epsilon():
    assert math.isnan(float(epsilons(torch.zeros(3, 1), torch.zeros(3, 1))))
    with pytest.raises(InputError, match="values: must hold an ε"):
        forgetting_quality(torch.tensor([math.nan]), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ShadowSignals(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4, 2)), "members: must be boolean"),
        (lambda: ShadowSignals(torch.zeros(4, 2), torch.zeros(3, 2), torch.ones(4, 2).bool()), "unlearned: must be"),
        (lambda: ShadowSignals(torch.zeros(4, 2), torch.zeros(4, 2), torch.ones(4, 2).bool()), "at least two shadows .*; found 0"),
        (lambda: u_lira(torch.zeros(3), made()), "target: must be one signal for each of the 30 candidates; found 3"),
        (lambda: ruli(torch.zeros(30), made(), "both"), "kind"),
        (lambda: epsilons(torch.zeros(4, 2), torch.zeros(3, 2)), "retrained: must be"),
        (partial(epsilons, torch.zeros(4), torch.zeros(4)), "unlearned: must be .networks, samples."),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_diverged_shadow_is_named():
    shadows = made()
    with pytest.raises(DivergedError, match="unlearned: 360 of 360 numbers are NaN"):
        ShadowSignals(shadows.trained, shadows.trained * math.nan, shadows.members)
