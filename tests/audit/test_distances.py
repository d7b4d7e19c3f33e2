"""KLOM as its program computes it, and the neighbours of a forgotten class."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from expunge.audit.distances import class_leak, klom
from expunge.errors import DivergedError, InputError


def program_klom(p, q):
    """compute_binned_KL_div of data-unlearning-bench, one sample."""
    p, q = numpy.clip(p, -100, 100), numpy.clip(q, -100, 100)
    start, end = min(p.min(), q.min()), max(p.max(), q.max())
    bins = numpy.linspace(start, end if start < end else start + 1, 21)
    counts = [numpy.array([(numpy.digitize(part, bins) == number).sum() for number in range(1, 21)]) for part in (p, q)]
    shares, others = (part / max(part.sum(), 1) for part in counts)
    return stats.entropy(pk=shares, qk=numpy.where(shares > 0, numpy.maximum(others, 1e-5), others))


@given(st.integers(0, 10**6), st.integers(5, 40), st.integers(5, 40))
@settings(max_examples=25, deadline=None)
def test_klom_is_the_programs(seed, networks, retrained):
    generator = numpy.random.default_rng(seed)
    first = generator.normal(generator.normal(0, 60, 6), generator.uniform(0.1, 30, 6), (networks, 6))
    second = generator.normal(0, 2, (retrained, 6))
    expected = numpy.array([program_klom(own, others) for own, others in zip(first.T, second.T, strict=True)])
    found, told = klom(torch.tensor(first), torch.tensor(second)).numpy(), ~numpy.isnan(expected)
    assert found[told] == pytest.approx(expected[told], abs=1e-9) and numpy.isfinite(found).all()


def test_klom_of_known_cases():
    same = torch.linspace(0, 1, 21)[:, None]
    assert float(klom(same, same)) == pytest.approx(0, abs=1e-12)
    assert float(klom(torch.zeros(9, 1), torch.zeros(9, 1))) == 0  # one point: a width of 1 is taken
    apart = klom(torch.tensor([[0.0], [0.01], [0.02]]), torch.tensor([[10.0], [10.1], [9.9]]))
    assert float(apart) == pytest.approx(numpy.log((1 + 1e-5) / 1e-5))  # all of p where q has the floor alone
    assert float(klom(torch.full((4, 1), 5.0), torch.arange(4.0)[:, None])) > 5  # NaN by the program: all of p at the last edge


def test_klom_with_all_of_the_retrained_at_the_last_edge_is_the_programs():
    first, second = numpy.array([0.0, 0.1, 3.0]), numpy.array([5.0, 5.0])
    assert float(klom(torch.tensor(first)[:, None], torch.tensor(second)[:, None])) == pytest.approx(program_klom(first, second))


def test_klom_bounds_what_is_beyond_100():
    spread = torch.tensor([[-1e9], [0.0], [1e9]])
    assert torch.equal(klom(spread, spread.flip(0)), klom(spread.clamp(-100, 100), spread.clamp(-100, 100)))


def answers(samples=200, towards=1, strength=4.0, seed=0):
    logits = torch.randn(samples, 5, generator=torch.Generator().manual_seed(seed))
    logits[:, towards] += strength
    return logits


def test_a_class_that_went_elsewhere_is_found():
    leak = class_leak(answers(towards=3), answers(towards=1, seed=1), forgotten=2)
    assert leak.nearest == 1 and leak.attack.low > 0.95 and leak.distance.low > 0.8
    assert leak.shares[0].high < 0.1 and leak.shares[1].low > 0.8


def test_a_network_like_a_retrained_one_is_not_told_from_it():
    leak = class_leak(answers(seed=2), answers(seed=1), forgotten=0)
    assert leak.nearest == 1 and leak.attack.value == pytest.approx(0.5, abs=0.08)


def test_the_forgotten_class_itself_does_not_count():
    """A filter that puts the class's logit to −∞ leaves everything else as it was."""
    retrained = answers()
    filtered = retrained.clone()
    filtered[:, 4] = -1e4
    leak = class_leak(filtered, retrained, forgotten=4)
    assert leak.distance.value == 0
    expected = torch.softmax(torch.cat([retrained[:, :2], retrained[:, 3:]], 1), 1)[:, 1].mean()
    assert class_leak(filtered, retrained, forgotten=2).shares[1].value == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: klom(torch.zeros(3, 2), torch.zeros(3, 4)), "retrained: must be of the same 2 samples; found 4"),
        (lambda: klom(torch.zeros(3), torch.zeros(3, 4)), "unlearned: must be .networks, samples."),
        (lambda: class_leak(answers(9), answers(9), 0), "unlearned: must hold at least 10 samples"),
        (lambda: class_leak(answers(20), answers(21), 0), "retrained: must be"),
        (lambda: class_leak(answers(20), answers(20), 5), "forgotten"),
        (lambda: class_leak(torch.zeros(20, 2), torch.zeros(20, 2), 0), "K three classes or more"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_nan_is_a_diverged_network():
    with pytest.raises(DivergedError, match="retrained: the logits are NaN in 20 of 20 rows"):
        class_leak(answers(20), answers(20) * torch.nan, 0)
