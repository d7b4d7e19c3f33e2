"""Areas within labels: a plain loop over pairs, known answers, and how often the interval covers the truth."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from expunge.audit.intervals import auc_interval
from expunge.audit.strata import stratified_auc
from expunge.errors import DivergedError, InputError


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 30), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_it_is_the_mean_over_pairs_of_one_label(seed, members, others, labels):
    numbers = numpy.random.default_rng(seed)
    first, second = numbers.integers(0, 6, members).astype(float), numbers.integers(0, 6, others).astype(float)  # with ties
    first[0] = numpy.inf
    own, theirs = numbers.integers(0, labels, members), numbers.integers(0, labels, others)
    pairs = [
        (a > b) + 0.5 * (a == b) for a, k in zip(first, own, strict=True) for b, other in zip(second, theirs, strict=True) if k == other
    ]
    call = torch.tensor(first), torch.tensor(second), torch.tensor(own), torch.tensor(theirs)
    if not pairs:
        with pytest.raises(InputError, match="others: must hold samples of the members' labels"):
            stratified_auc(*call)
        return
    area = stratified_auc(*call)
    assert area.value == pytest.approx(sum(pairs) / len(pairs)) and 0 <= area.low <= area.value <= area.high <= 1


def test_of_one_label_it_is_the_area_and_its_interval():
    numbers = torch.Generator().manual_seed(0)
    first, second = torch.randn(40, generator=numbers), torch.randn(25, generator=numbers)
    labels = torch.full((40,), 7), torch.full((25,), 7)
    assert stratified_auc(first, second, *labels) == auc_interval(first, second)
    # Labels that only one side has do not count.
    more = torch.cat([first, torch.full((9,), 50.0)]), torch.cat([labels[0], torch.full((9,), 3)])
    assert stratified_auc(more[0], second, more[1], labels[1]) == auc_interval(first, second)


def test_a_mix_of_labels_that_differs_tells_nothing():
    """Hard labels have low scores whoever has them; the forget set has more of the hard ones."""
    numbers = torch.Generator().manual_seed(1)
    own, theirs = (torch.rand(400, generator=numbers) < share for share in (0.8, 0.3))
    first, second = (torch.randn(400, generator=numbers) - 3 * hard for hard in (own, theirs))
    assert auc_interval(first, second).high < 0.4  # "driven away", by the mix alone
    assert 0.5 in stratified_auc(first, second, own.long(), theirs.long())
    known = stratified_auc(first + 1, second, own.long(), theirs.long())
    assert known.low > 0.65 and stats.norm.cdf(1 / numpy.sqrt(2)) in known


def test_all_apart_has_a_width():
    labels = torch.arange(30) % 3
    area = stratified_auc(torch.ones(30), torch.zeros(30), labels, labels)
    assert (area.value, area.high) == (1, 1) and 0.8 < area.low < 1


@pytest.mark.parametrize(("shifts", "most"), [((0, 0, 0, 0), 0.98), ((1, 1, 1, 1), 0.98), ((0, 0.3, 1, 2.5), 1)])
def test_the_interval_covers_the_truth(shifts, most):
    """Of 400 intervals at 95 %, at least 92 %; too many where the area differs between labels: the variance of equal ones is larger."""
    numbers = numpy.random.default_rng(3)
    sizes = [(3, 10), (25, 4), (10, 10), (40, 6)]
    weights = numpy.array([m * n for m, n in sizes]) / sum(m * n for m, n in sizes)
    truth = float(weights @ stats.norm.cdf(numpy.array(shifts) / numpy.sqrt(2)))
    own, theirs = (torch.tensor(numpy.repeat(range(4), [size[side] for size in sizes])) for side in (0, 1))
    covered = 0
    for _ in range(400):
        first = torch.tensor(numbers.normal(size=len(own))) + torch.tensor(shifts)[own] + 5.0 * own
        second = torch.tensor(numbers.normal(size=len(theirs))) + 5.0 * theirs
        covered += truth in stratified_auc(first, second, own, theirs)
    assert 0.92 <= covered / 400 <= most


def test_bad_input_is_named():
    zeros, labels = torch.zeros(4), torch.zeros(4, dtype=torch.long)
    with pytest.raises(InputError, match="member_labels: must be 4 labels, one per score; found shape"):
        stratified_auc(zeros, zeros, labels[:3], labels)
    with pytest.raises(DivergedError, match="members: 4 of 4 numbers are NaN"):
        stratified_auc(zeros * torch.nan, zeros, labels, labels)
    with pytest.raises(InputError, match="members: must hold at least one sample"):
        stratified_auc(zeros[:0], zeros, labels[:0], labels)
