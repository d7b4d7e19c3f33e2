"""Totals that are added before their batch is done: the same bits, and never twice where the batch has to be computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expunge.fisher import adders, diagonal
from expunge.fisher.closed_forms import rules
from expunge.fisher.closed_forms.early import Early
from expunge.fisher.confirming import Confirmation


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 6), nn.Tanh(), nn.Linear(6, 4))


def batches(samples: int = 8):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(samples, 3, 8, 8, generator=generator), torch.arange(samples) % 4) for _ in range(5)]


@pytest.fixture
def held(monkeypatch):
    """The sums of the network where all totals are held to the end of their batch."""
    with monkeypatch.context() as patch:
        patch.setattr(adders.Samplewise, "early_sums", lambda adder: {})
        return diagonal(network(), batches())


@pytest.fixture
def added(monkeypatch):
    """The names of totals that are added early, one after the other."""
    names, add = [], Early.add

    def note(early, name, total):
        add(early, name, total)
        names.append(name)

    monkeypatch.setattr(Early, "add", note)
    return names


def same(sums, others) -> bool:
    return sums.count == others.count and all(torch.equal(sums.sums[name], other) for name, other in others.sums.items())


def test_bits_are_the_same(held, added):
    assert same(diagonal(network(), batches()), held)
    assert len(added) >= 3 * 4 and {*added} == {"0.weight", "2.weight", "4.weight", "6.weight"}


def test_nothing_is_added_early_of_several_backward_passes(added):
    diagonal(network(), batches(), kind="expected")
    assert not added


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("something else")])
def test_a_pass_that_fails_half_way_is_not_added_twice(held, added, error, monkeypatch):
    squares, failed = rules.convolution.squares, []

    def failing(*args):
        if len(added) > 5 and not failed:
            failed.append(len(added))
            raise error
        return squares(*args)

    monkeypatch.setattr(rules.convolution, "squares", failing)
    assert same(diagonal(network(), batches()), held) and failed and len(added) == failed[0]  # held from then on


@pytest.mark.parametrize("where", ["add", "commit"])
def test_a_batch_that_fails_after_its_pass_is_not_added_twice(held, added, where, monkeypatch):
    owner = Confirmation if where == "add" else adders.Samplewise
    method, failed = getattr(owner, where), []

    def failing(*args):
        if len(added) > 5 and not failed:
            failed.append(len(added))
            raise torch.OutOfMemoryError("out of memory")
        return method(*args)

    monkeypatch.setattr(owner, where, failing)
    assert same(diagonal(network(), batches()), held) and failed and len(added) == failed[0]


class Unseen(torch.autograd.Function):
    """A use that shows in a gradient alone, after the backward pass."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Turning(nn.Module):
    """Uses its first weight once more where a sample begins with a large number: `way` tells how."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x).tanh()
        if (x[:, 0] > 50).any():
            weight = self.first.weight if self.way == "outside" else Unseen.apply(self.first.weight)
            again = self.first(y) if self.way == "again" else y * (weight**2).sum()
            y = torch.where(x[:, :1] > 50, again, y)
        return self.last(y)


@pytest.mark.parametrize("way", ["again", "outside", "unseen"])
def test_a_later_batch_that_uses_a_parameter_in_another_way(way, added):
    torch.manual_seed(0)
    model, x, y = Turning(way).double(), torch.randn(40, 6, dtype=torch.float64), torch.arange(40) % 3
    x[35, 0] = 100.0
    sums = diagonal(model, list(zip(x.split(8), y.split(8), strict=True)))
    for name, parameter in model.named_parameters():
        losses = [nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]) for row in range(40)]
        squares = [torch.autograd.grad(loss, parameter)[0].square() for loss in losses]
        assert torch.allclose(sums.sums[name], torch.stack(squares).sum(0), rtol=1e-10, atol=0)


def test_totals_that_are_wrong_are_noticed(added, monkeypatch):
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3, bias=False).double(), torch.randn(40, 5, dtype=torch.float64), torch.arange(40) % 3
    parts = list(zip(x.split(8), y.split(8), strict=True))
    expected, products, calls = diagonal(model, parts).sums["weight"], rules.squared_products, []
    assert added

    def doubled(*args):
        calls.append(added.copy())
        return products(*args) * (2 if len(calls) > 4 else 1)

    added.clear()
    monkeypatch.setattr(rules, "squared_products", doubled)
    assert torch.allclose(diagonal(model, parts).sums["weight"], expected, rtol=1e-10) and added and len(calls) > 4


def test_a_pass_that_does_not_count_is_not_added_twice(held, added, monkeypatch):
    run, failed = adders.planned_pass, []

    def unexpected(*args):
        result = run(*args)
        if len(added) > 5 and not failed:
            failed.append(len(added))
            result.unexpected = {"6.bias"}  # as where a gradient appears that no closed form accounts for
        return result

    monkeypatch.setattr(adders, "planned_pass", unexpected)
    assert same(diagonal(network(), batches()), held) and failed and len(added) == failed[0]
