"""Squares that are not those of the rows they were formed from are noticed, though the drawn samples' rows are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expunge.fisher import diagonal
from expunge.fisher.closed_forms import convolution, rules, shared
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.planning.plan import Plan
from tests.fisher.cases import MODELS, build
from tests.fisher.patterns import K, check, labels

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
FEW = 2  # samples, on which plans are made: the faults below need more


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(K, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = self.table(x)
        return (torch.tanh(self.inner(torch.tanh(self.inner(x)))) @ self.table.weight.T).mean(1)


def images(channels: int = 3):
    return torch.randn(9, channels, 5, 5).double(), labels(9)


CASES = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, K)),
        lambda: (torch.randn(9, 5).double(), labels(9)),
        (rules, "squared_products", lambda a, g, *rest: (a[:-1], g[:-1], *rest)),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(100, K)),
        images,
        (convolution, "choose", None),
    ),
    "table": (
        lambda: nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Tanh(), nn.Linear(15, K)),
        lambda: (torch.randint(0, 7, (9, 3)), labels(9)),
        (shared.Pairs, "of", lambda indices, gradients, count: (indices, gradients * 1.01, count)),
    ),
    "several uses": (
        Tied,
        lambda: (torch.randint(0, K, (9, 3)), labels(9)),
        (shared, "squared_products", lambda a, g, *rest: (a, g * 1.01, *rest)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_that_only_more_samples_show(name, monkeypatch):
    make, data, (place, function, change) = CASES[name]
    true, revised, revise = getattr(place, function), [], Plan.revise

    def faulty(first, *rest):
        if function == "choose":
            way = true(first, *rest)
            return lambda a, g, *others: way(a, g * (1 if len(a) <= FEW else 1.01), *others)
        return true(*change(first, *rest)) if len(first) > FEW else true(first, *rest)

    monkeypatch.setattr(Plan, "revise", lambda plan, names: revised.append(names) or revise(plan, names))
    monkeypatch.setattr(place, function, staticmethod(faulty) if isinstance(place, type) else faulty)
    torch.manual_seed(0)
    check(make(), [data(), data(), data()])
    assert revised


@pytest.mark.parametrize("name", [*MODELS][::4])
def test_what_is_right_passes(name, monkeypatch):
    """Of all parameters in every batch, in float32, which rounds most."""
    wrong, find = [], Audit.wrong
    monkeypatch.setattr("expunge.fisher.confirming.Confirmation.audit", lambda self, plan, samples: Audit(float(self.generator.random())))
    monkeypatch.setattr(Audit, "wrong", lambda self, squares: wrong.extend(find(self, squares)) or set())
    model, batch = build(name)
    diagonal(model.float(), [tuple(part.float() if part.is_floating_point() else part for part in batch)] * 2)
    assert not wrong


def test_rows_of_a_convolution_with_groups_and_strides():
    torch.manual_seed(0)
    weight = torch.randn(6, 2, 3, 2).double().requires_grad_()
    x, slopes = torch.randn(5, 4, 7, 6).double(), torch.randn(5, 6, 4, 4).double()
    geometry = convolution.Geometry((3, 2), (2, 2), (1, 1), (1, 1), 2)
    single = []
    for n in range(5):
        out = nn.functional.conv2d(x[n : n + 1], weight, None, 2, 1, 1, 2)
        single.append(torch.autograd.grad(out, weight, slopes[n : n + 1])[0])
    expected = torch.stack(single).square().sum(0)
    for pick in torch.arange(0, 1, 1 / 36).tolist():
        audit = Audit(pick)
        convolution.audit(audit, "weight", x, slopes, geometry, 5)
        audit.settle()
        assert audit.squares and not audit.wrong({"weight": expected})
        place = audit.places["weight"]
        torch.testing.assert_close(audit.squares["weight"][0], expected[place])
        assert audit.wrong({"weight": expected * 1.001}) and audit.wrong({})


@pytest.mark.parametrize("kind", ["empirical", "expected", "sampled"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(8, K), lambda: nn.Sequential(nn.Conv2d(2, K, 2), nn.Flatten())])
def test_squares_that_underflow_raise_no_alarm(kind, make, monkeypatch):
    """As those of classes that are nearly impossible, in any well trained network."""
    revised = []
    monkeypatch.setattr(Plan, "revise", lambda self, names: revised.append(names))
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        list(model.parameters())[1].copy_(torch.tensor([0.0] + [-49.0] * (K - 1)))  # probabilities of 1e-21, squares of 1e-43
    x = torch.randn(96, 8).view(96, *((8,) if isinstance(model, nn.Linear) else (2, 2, 2)))
    diagonal(model, list(zip(x.split(32), torch.zeros(96, dtype=torch.int64).split(32), strict=True)), kind=kind)
    assert not revised
