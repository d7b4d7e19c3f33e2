"""F(all) − F(forget) where the forget samples carry nearly all of a sum: what precision is left, and how that is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from expunge.errors import MismatchError
from expunge.fisher import FisherSums, diagonal

PRECISION = {torch.float64: 1e-14, torch.float32: 2e-6}  # of the sums themselves, as parts of an entry


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
def test_the_heaviest_samples_are_taken_away(dtype, scale):
    """What remains, r of w, is right to some ε · w/r: the heavier the forget samples, the fewer digits are left."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(60, 6, generator=generator).to(dtype), torch.randint(3, (60,), generator=generator)
    images[:20] *= scale  # the samples to forget carry up to 10⁶ times the squares of the others
    model = nn.Linear(6, 3).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 6, generator=generator) / scale)  # so that no sample is fitted
        model.bias.zero_()
    sums = {name: diagonal(model, [(images[rows], labels[rows])]) for name, rows in (("all", slice(0, 60)), ("forget", slice(0, 20)))}
    remain = diagonal(model.double(), [(images[20:].double(), labels[20:])]).sums
    left, whole = sums["all"] - sums["forget"], sums["all"]
    for name, exact in remain.items():
        assert bool(((left.sums[name] - exact).abs() <= PRECISION[dtype] * whole.sums[name]).all())
    shares = torch.cat([(exact / whole.sums[name]).flatten() for name, exact in remain.items()])
    for digits in (0.5, 2, 4):
        assert whole.cancelled(sums["forget"], digits) == pytest.approx(float((shares <= 10**-digits).double().mean()), abs=0.05)
    if scale == 1e3:
        assert float(shares[:18].median()) < 1e-5 and whole.cancelled(sums["forget"], 4) > 0.7


def test_entries_without_a_sum_lose_no_digits():
    empty = FisherSums({"w": torch.zeros(3, dtype=torch.float64)}, 2, "empirical", "digest")
    assert empty.cancelled(empty) == 0
    full = FisherSums({"w": torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)}, 2, "empirical", "digest")
    assert full.cancelled(full) == 1 and full.cancelled(replace(empty, count=1)) == 0
    with pytest.raises(MismatchError):
        full.cancelled(replace(full, digest="other"))
