"""Attacks with a few reference networks: the programs' formulas as plain loops, known answers, laws."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from expunge.audit.membership import (
    Probabilities,
    completeness,
    completeness_rates,
    completeness_signal,
    confidence,
    rmia,
    rmia_rates,
    true_probability,
    tuned_offline,
)
from expunge.errors import DivergedError, InputError


def drawn(*shape, seed=0, scale=4.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels_of(samples, classes=5, seed=1):
    return torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))


def test_confidence_is_the_logit_of_the_probability():
    logits, labels = drawn(3, 20, 5), labels_of(20)
    for network, rows in zip(confidence(logits, labels), logits.tolist(), strict=True):
        for value, row, label in zip(network.tolist(), rows, labels.tolist(), strict=True):
            probability = math.exp(row[label]) / sum(map(math.exp, row))
            assert value == pytest.approx(math.log(probability) - math.log(1 - probability), abs=1e-9)


def test_confidence_does_not_saturate_where_probabilities_do():
    logits = torch.tensor([[200.0, 0.0, 0.0], [300.0, 0.0, 0.0], [-900.0, 0.0, 0.0]])
    labels = torch.zeros(3, dtype=torch.int64)
    assert confidence(logits, labels).tolist() == pytest.approx([200 - math.log(2), 300 - math.log(2), -900 - math.log(2)])
    assert true_probability(logits, labels)[:2].tolist() == [1.0, 1.0]


def test_confidence_with_a_floor_is_what_rulis_program_has():
    logits, labels = drawn(200, 4, scale=12.0), labels_of(200, 4)
    probabilities = torch.softmax(logits, 1).numpy()
    own = probabilities[range(200), labels.numpy()]
    others = probabilities.copy()
    others[range(200), labels.numpy()] = 0
    expected = numpy.log(numpy.clip(own, 1e-6, 1 - 1e-6)) - numpy.log(numpy.clip(others.sum(1), 1e-6, None))
    assert (numpy.abs(expected) > 13).any()
    assert confidence(logits, labels, floor=1e-6).numpy() == pytest.approx(expected, abs=1e-8)


def program_rmia(target, references, population_target, population_references, a):
    """privacy-meter's run_rmia: arrays are (samples, networks), no sample a member of any reference."""
    mean_x = (1 + a) / 2 * numpy.mean(references, axis=1) + (1 - a) / 2
    mean_z = (1 + a) / 2 * numpy.mean(population_references, axis=1) + (1 - a) / 2
    ratios = (target / mean_x)[:, None] / (population_target / mean_z)
    return numpy.average(ratios > 1.0, axis=1)


def asked(samples, references, seed, members=0.0):
    """Probabilities of an audited network that knows the samples better by `members`."""
    rows = drawn(references + 1, samples, 5, seed=seed, scale=2.0)
    labels = labels_of(samples, seed=seed)
    rows[0, range(samples), labels] += members
    values = true_probability(rows, labels)
    return Probabilities(values[0], values[1:])


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=30, deadline=None)
def test_rmia_is_the_programs(seed, references, a):
    samples, population = asked(40, references, seed), asked(70, references, seed + 1)
    expected = program_rmia(
        samples.audited.numpy(), samples.references.T.numpy(), population.audited.numpy(), population.references.T.numpy(), a
    )
    assert rmia(samples, population, a).numpy() == pytest.approx(expected, abs=1e-12)


def test_rmia_knows_members_and_is_blind_where_there_are_none():
    population, unseen = asked(3000, 2, 1), asked(1500, 2, 2)
    known, chance = rmia_rates(asked(1500, 2, 3, members=3.0), unseen, population), rmia_rates(asked(1500, 2, 4), unseen, population)
    assert known.area.low > 0.7 and known.at_percent.chance < 1e-6
    assert 0.5 in chance.area and chance.at_percent.chance > 0.01


def test_a_is_the_one_with_the_largest_area():
    members, others, population = asked(300, 2, 5, members=2.0), asked(300, 2, 6), asked(300, 2, 7)
    areas = {}
    for step in range(11):
        own, rest = (rmia(part, population, step / 10).numpy() for part in (members, others))
        areas[step / 10] = numpy.mean((own[:, None] > rest) + 0.5 * (own[:, None] == rest))
    assert areas[tuned_offline(members, others, population)] == pytest.approx(max(areas.values()))


def program_iam(original, unlearned, references, steps, family, pooled):
    """interpolate_appro of the authors' program, in float64."""
    alphas = numpy.linspace(0, 1, steps)
    moved = numpy.stack([references + (original - references) * alpha for alpha in alphas], axis=1)
    mean = moved.mean(axis=0)[:-1].reshape(-1)
    if pooled or len(references) == 1:
        deviation = numpy.repeat(numpy.std(moved, axis=(0, 2))[:-1], moved.shape[2])
    else:
        deviation = moved.std(axis=0)[:-1].reshape(-1)
    values = numpy.tile(unlearned, steps - 1)
    if family == "gumbel":
        scale = numpy.sqrt(6) * deviation / numpy.pi
        with numpy.errstate(over="ignore"):
            shares = stats.gumbel_r.cdf(values, mean - scale * 0.5772, scale)
    else:
        shares = stats.norm.cdf(values, mean, deviation + 1e-30)
    weights = alphas[1:]
    return 1 - (weights[:, None] * shares.reshape(steps - 1, -1)).sum(axis=0) / weights.sum()


@pytest.mark.parametrize("references", [1, 4])
@pytest.mark.parametrize("family", ["gumbel", "norm"])
@pytest.mark.parametrize("pooled", [True, False])
def test_completeness_is_the_programs(references, family, pooled):
    answers = true_probability(drawn(references + 2, 60, 5), labels_of(60))
    signals = completeness_signal(answers)
    raw = -numpy.log(1e-2 - numpy.log(1e-5 + answers.numpy()))
    ends = -numpy.log(1e-2 - numpy.log(1e-5 + numpy.array([0.0, 1.0])))
    normal = (raw - ends[0]) / (ends[1] - ends[0])
    assert signals.numpy() == pytest.approx(normal, abs=1e-12)
    expected = program_iam(normal[0], normal[1], normal[2:], 100, family, pooled)
    found = completeness(signals[0], signals[1], signals[2:], 100, family, pooled)
    assert found.numpy() == pytest.approx(expected, abs=1e-9)


def test_completeness_orders_never_seen_half_forgotten_and_remembered():
    references, original = torch.rand(4, 500, generator=torch.Generator().manual_seed(0)) * 0.3, torch.full((500,), 0.95)
    scores = [completeness(original, part, references).mean() for part in (references[0], (references[0] + 0.95) / 2, original)]
    assert scores[0] > scores[1] + 0.1 and scores[1] > scores[2] + 0.1 and scores[2] < 0.1


def test_completeness_tells_forgotten_from_unseen_samples():
    numbers = torch.Generator().manual_seed(3)
    references, unseen = 0.6 * torch.rand(2, 2, 400, generator=numbers)
    original = 0.9 + 0.1 * torch.rand(400, generator=numbers)
    still_known = completeness_rates(Probabilities(original, references), Probabilities(unseen[1], unseen), original, unseen[0] + 0.1)
    assert still_known.area.low > 0.8 and still_known.at_permille is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: confidence(torch.zeros(3), torch.zeros(3).long()), "logits: must be"),
        (lambda: confidence(torch.zeros(3, 2), torch.zeros(2).long()), "labels: must be one whole number for each of the 3 samples"),
        (lambda: confidence(torch.zeros(3, 2), torch.tensor([0, 1, 2])), "labels: must be from 0 to 1; found 0 to 2"),
        (lambda: Probabilities(torch.rand(3), torch.rand(3)), r"references: must be \(networks, 3\)"),
        (lambda: Probabilities(torch.rand(3), torch.zeros(0, 3)), "references"),
        (lambda: Probabilities(torch.tensor([1.5]), torch.rand(1, 1)), "audited: must be probabilities"),
        (lambda: rmia(asked(3, 1, 0), asked(3, 1, 0), 1.5), "offline"),
        (lambda: completeness(torch.rand(3), torch.rand(2), torch.rand(1, 2)), "original: must be as many as the 2 of unlearned"),
        (lambda: completeness(torch.rand(2), torch.rand(2), torch.rand(1, 2), family="beta"), "family"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_nan_is_a_diverged_network():
    with pytest.raises(DivergedError, match="NaN in 1 of 2 rows"):
        confidence(torch.tensor([[0.0, math.nan], [0.0, 0.0]]), torch.zeros(2).long())
