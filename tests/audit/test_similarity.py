"""Likeness of inner outputs and of answers, against plain references and known answers."""

from __future__ import annotations

import math

import pytest
import torch

from expunge.audit.intervals import Interval
from expunge.audit.reading import Part
from expunge.audit.rounding import round_to, rounded
from expunge.audit.similarity import cka, cka_interval, divergences, retrain_free_divergence
from expunge.audit.student import reach, student_quantile, student_share
from expunge.errors import InputError
from tests.audit.small import CLASSES, trained
from tests.audit.test_reading import read, sets


def by_pairs(x: torch.Tensor, y: torch.Tensor) -> float:
    """CKA from the Gram matrices, by HSIC, as it is defined."""
    n = len(x)
    centre = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)

    def hsic(a, b):
        return float(torch.trace(a @ centre @ b @ centre))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


def test_cka_is_that_of_the_gram_matrices():
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 5, generator=numbers, dtype=torch.float64), torch.randn(30, 7, generator=numbers, dtype=torch.float64)
    assert cka(x, y) == pytest.approx(by_pairs(x, y), rel=1e-9)
    turned = 3 * x @ torch.linalg.qr(torch.randn(5, 5, generator=numbers, dtype=torch.float64))[0] + 2
    assert cka(x, turned) == pytest.approx(1, abs=1e-12)
    assert cka(x, torch.ones_like(x)) == 0
    interval = cka_interval(x, y, draws=50)
    assert interval.low <= interval.value <= interval.high < 1


def test_divergence_is_that_of_a_loop_and_finite():
    numbers = torch.Generator().manual_seed(0)
    first, second = torch.randn(6, 4, generator=numbers), torch.randn(6, 4, generator=numbers)
    for row, value in enumerate(divergences(first, second).tolist()):
        p, q = first[row].double().softmax(0).tolist(), second[row].double().softmax(0).tolist()
        expected = sum(a * math.log(2 * a / (a + b)) / 2 + b * math.log(2 * b / (a + b)) / 2 for a, b in zip(p, q, strict=True))
        assert value == pytest.approx(expected, abs=1e-12)
    certain = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    assert divergences(certain, certain.flip(1)).tolist() == pytest.approx([math.log(2)] * 2)
    assert divergences(first, first).max() < 1e-15


def test_retrain_free_divergence_compares_mean_outputs_by_label():
    after, original = (read(trained(seed), sets()) for seed in (1, 0))
    values = []
    for label in range(CLASSES):
        means = []
        for reading, name in ((after, "remain" if label != 2 else "forget"), (original, "test")):
            part = reading[name]
            means.append(part.logits[part.sampled_labels == label].double().softmax(1).mean(0))
        p, q = means
        m = (p + q) / 2
        values.append(float((p * (p / m).log()).sum() / 2 + (q * (q / m).log()).sum() / 2))
    assert retrain_free_divergence(after["forget"], original["test"], torch.tensor([2])).value == pytest.approx(values[2], rel=1e-6)
    several = retrain_free_divergence(after["remain"], original["test"], torch.tensor([0, 1, 3]))
    assert several.value == pytest.approx((values[0] + values[1] + values[3]) / 3, rel=1e-6)
    assert 0 <= several.low < several.value < several.high <= math.log(2)


def test_the_interval_of_the_retrain_free_divergence_holds_that_of_many_samples():
    numbers = torch.Generator().manual_seed(0)

    def part(count: int, shift: float) -> Part:
        logits = torch.randn(count, 3, generator=numbers) + torch.tensor([shift, 0.0, 0.0])
        outputs, zeros = logits.double().softmax(1).mean(0, keepdim=True), torch.zeros(count, dtype=torch.int64)
        return Part(zeros, zeros, logits, logits, outputs, torch.tensor([count]), torch.arange(count), logits, {})

    def interval(count: int) -> Interval:
        return retrain_free_divergence(part(count, 1.0), part(count, 0.0), torch.tensor([0]))

    truth, few = interval(200_000).value, [interval(60) for _ in range(60)]
    assert sum(truth in one for one in few) >= 51  # of 95 %: 60 intervals hold it fewer times with a probability of 1e-4
    assert few[0].high - few[0].low > 2 * (interval(960).high - interval(960).low)


def test_rounding_is_to_the_nearest_of_a_channels_steps():
    weights = torch.tensor([[0.7, -0.25, 0.04], [7.0, 1.4, -3.6], [0.0, 0.0, 0.0]])
    assert torch.allclose(
        round_to(weights, 4), torch.tensor([[0.7, -0.2, 0.0], [7.0, 1.0, -4.0], [0.0, 0.0, 0.0]]), atol=1e-6
    ) or torch.allclose(round_to(weights, 4), torch.tensor([[0.7, -0.3, 0.0], [7.0, 1.0, -4.0], [0.0, 0.0, 0.0]]), atol=1e-6)
    model = trained(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for bits in (8, 4):
        copy = rounded(model, bits)
        for (name, value), coarse in zip(model.named_parameters(), copy.parameters(), strict=True):
            if value.dim() == 1:
                assert torch.equal(value, coarse)
                continue
            step = value.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            assert ((value - coarse).abs() <= step / 2 * 1.0001).all() and len(coarse[0].unique()) <= 2**bits, name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="bits"):
        rounded(model, 1)


def test_students_quantiles_are_those_of_tables():
    table = {(0.95, 1): 12.7062, (0.95, 2): 4.3027, (0.95, 3): 3.1824, (0.95, 10): 2.2281, (0.99, 4): 4.6041, (0.99, 29): 2.7564}
    for (share, freedom), value in table.items():
        assert student_quantile(share, freedom) == pytest.approx(value, abs=5e-5)
        assert student_share(value, freedom) == pytest.approx(share, abs=1e-5)
    assert reach([0.0, 1.0, 2.0], 0.05) == pytest.approx(4.3027 * math.sqrt(4 / 3), abs=1e-3)
    assert reach([0.5] * 5, 0.01) == 0


def test_a_prediction_interval_holds_as_often_as_it_says():
    numbers = torch.Generator().manual_seed(0)
    draws = torch.randn(4000, 5, generator=numbers, dtype=torch.float64).tolist()
    outside = sum(abs(row[4] - sum(row[:4]) / 4) > reach(row[:4], 0.05) for row in draws)
    assert 0.04 < outside / len(draws) < 0.06
