"""All measures of tiers 3 and 4 on the same float32 logits, from these on, beside the programs' formulas written out: equal to 1e-6."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from scipy import stats
from sklearn.neighbors import KernelDensity

from expunge.audit.distances import klom
from expunge.audit.membership import Probabilities, completeness, completeness_signal, confidence, rmia, true_probability
from expunge.audit.shadow_attacks import ShadowSignals, epsilons, ruli, u_lira
from expunge.audit.shadows import memberships
from tests.audit.test_distances import program_klom
from tests.audit.test_membership import program_iam, program_rmia
from tests.audit.test_shadow_attacks import program_epsilon

NETWORKS, SAMPLES, CLASSES = 32, 24, 10


@pytest.fixture(scope="module")
def answers():
    """Float32 logits as networks give them, (networks, samples, classes), with labels, and which network was trained on what."""
    numbers = torch.Generator().manual_seed(18)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=numbers)
    members = memberships(NETWORKS, SAMPLES, seed=2)
    logits = 3 * torch.randn(SAMPLES, CLASSES, generator=numbers) + 2 * torch.randn(NETWORKS, SAMPLES, CLASSES, generator=numbers)
    own = torch.nn.functional.one_hot(labels, CLASSES) * members[..., None]
    return (logits + 4 * own).float(), (logits + own).float(), labels, members


def program_probabilities(logits, labels):
    """softmax in float64, the column of the label."""
    rows = logits.double().numpy()
    shares = numpy.exp(rows - rows.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return numpy.take_along_axis(shares, numpy.broadcast_to(labels.numpy()[None, :, None], (*shares.shape[:2], 1)), 2)[..., 0]


def program_signals(logits, labels):
    """log p − log(1 − p), with the sum of the other classes in place of 1 − p."""
    values = []
    for network in logits.double().numpy():
        for row, label in zip(network, labels.tolist(), strict=True):
            others = numpy.delete(row, label)
            values.append(row[label] - others.max() - numpy.log(numpy.exp(others - others.max()).sum()))
    return numpy.array(values).reshape(logits.shape[:2])


def test_rmia_and_iam(answers):
    trained, unlearned, labels, _ = answers
    given = program_probabilities(torch.cat([unlearned[:1], trained[:1], trained[10:14]]), labels)
    audited, original, references = given[0], given[1], given[2:]
    half = SAMPLES // 2
    ours = true_probability(torch.cat([unlearned[:1], trained[:1], trained[10:14]]), labels)
    parts = [Probabilities(ours[0, rows], ours[2:, rows]) for rows in (slice(half), slice(half, None))]
    expected = program_rmia(audited[:half], references[:, :half].T, audited[half:], references[:, half:].T, 0.3)
    assert rmia(*parts).numpy() == pytest.approx(expected, abs=1e-6)
    ends = [-numpy.log(1e-2 - numpy.log(1e-5 + end)) for end in (0.0, 1.0)]
    raw = (-numpy.log(1e-2 - numpy.log(1e-5 + given)) - ends[0]) / (ends[1] - ends[0])
    found = completeness(*map(completeness_signal, (ours[1], ours[0], ours[2:])))
    assert found.numpy() == pytest.approx(program_iam(raw[1], raw[0], raw[2:], 100, "gumbel", True), abs=1e-6)
    assert not numpy.allclose(original, audited)


def test_u_lira_and_ruli(answers):
    trained, unlearned, labels, members = answers
    before, after = (program_signals(part, labels) for part in (trained, unlearned))
    signals = ShadowSignals(confidence(trained[1:], labels), confidence(unlearned[1:], labels), members[1:])
    bounded = ShadowSignals(confidence(trained[1:], labels, 1e-6), confidence(unlearned[1:], labels, 1e-6), members[1:])
    gaussians = torch.sigmoid(u_lira(confidence(unlearned[0], labels), signals)).tolist()
    kernels = torch.sigmoid(ruli(confidence(unlearned[0], labels, 1e-6), bounded)).tolist()
    limit = math.log((1 - 1e-6) / 1e-6)
    for column, (by_gaussians, by_kernels) in enumerate(zip(gaussians, kernels, strict=True)):
        inside, values = members[1:, column].numpy(), after[:, column]
        sides = values[1:][inside], values[1:][~inside]
        first, second = (stats.norm.pdf(values[0], side.mean(), side.std()) for side in sides)
        assert by_gaussians == pytest.approx(first / (first + second), abs=1e-6)
        fits = [KernelDensity().fit(side.clip(-limit, limit)[:, None]) for side in sides]
        first, second = (math.exp(fit.score_samples([[values[0].clip(-limit, limit)]])[0]) for fit in fits)
        assert by_kernels == pytest.approx(first / (first + second), abs=1e-6)
    assert confidence(trained, labels).numpy() == pytest.approx(before, abs=1e-9)


def test_klom_and_epsilon(answers):
    trained, unlearned, labels, _ = answers
    own, others = (program_signals(part, labels) for part in (unlearned[:16], trained[16:]))
    ours = confidence(unlearned[:16], labels), confidence(trained[16:], labels)
    expected = [program_klom(*pair) for pair in zip(own.T, others.T, strict=True)]
    assert klom(*ours).numpy() == pytest.approx(expected, abs=1e-6)
    values = []
    for first, second in zip(own.T[:4], others.T[:4], strict=True):
        swapped = numpy.median(second) > numpy.median(first)
        values.append(program_epsilon(second, first) if swapped else program_epsilon(first, second))
    found = epsilons(ours[0][:, :4], ours[1][:, :4])
    assert found.numpy() == pytest.approx(values, abs=1e-6, nan_ok=True)
    assert not found.isnan().all()
