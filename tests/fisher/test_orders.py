"""What two samples do not tell: in which order other uses have their rows, and what torch.func gives for several cotangents at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.fisher import diagonal, plan
from tests import reference
from tests.fisher.patterns import K, check

pytestmark = pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning")


class Again(nn.Module):
    """A layer, used again on the samples in another order behind a gate that few of them open."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.layer, self.head = scale, nn.Linear(4, 4), nn.Linear(4, K)

    def forward(self, x):
        gate = (x[:, :1] > 1.0).to(x.dtype)
        other = torch.stack([x[(index + 1) % len(x)] for index in range(len(x))])
        return self.head(x + self.scale * torch.tanh(self.layer(x) + gate * self.layer(other).roll(1, 0)))


@pytest.mark.parametrize(("scale", "dtype", "size"), [(1e-6, torch.float32, 8), (1.0, torch.float64, 40)])
def test_a_second_use_on_the_samples_in_another_order(scale, dtype, size):
    for seed in range(4):
        torch.manual_seed(seed)
        model, x, y = Again(scale).to(dtype).eval(), torch.randn(40, 4).to(dtype), torch.randint(0, K, (40,))
        found = diagonal(model, list(zip(x.split(size), y.split(size), strict=True))).sums
        expected = reference.fisher(copy.deepcopy(model).double(), (x.double(), y))
        assert reference.worst_error(found, expected) <= (1e-10 if dtype == torch.float64 else 1e-3)


class BareAgain(nn.Module):
    """The same of a bare parameter, or of a part of it."""

    def __init__(self, shape: tuple[int, ...], scale: float) -> None:
        super().__init__()
        self.scale, self.vector, self.head = scale, nn.Parameter(torch.randn(shape)), nn.Linear(4, K)

    def forward(self, x):
        vector = self.vector[:, 1:] if self.vector.dim() == 2 else self.vector
        other, gate = torch.cat([x[1:], x[:1]]) * vector, (x[:, :1] > 1.0).to(x.dtype)
        return self.head(x * vector + self.scale * gate * torch.cat([other[-1:], other[:-1]]))


@pytest.mark.parametrize("shape", [(4,), (1, 5)])
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(("scale", "dtype", "size"), [(3e-3, torch.float32, 3), (1.0, torch.float64, 40)])
def test_a_bare_parameter_again_on_the_samples_in_another_order(shape, scale, dtype, size, near):
    for seed in range(4):
        torch.manual_seed(seed)
        model, x, y = BareAgain(shape, scale).to(dtype).eval(), torch.randn(39, 4).to(dtype), torch.randint(0, K, (39,))
        if near:
            x[1] = x[0] + 1e-4 * x[1]
        found = diagonal(model, list(zip(x.split(size), y.split(size), strict=True))).sums
        expected = reference.fisher(copy.deepcopy(model).double(), (x.double(), y))
        assert reference.worst_error(found, expected) <= (1e-10 if dtype == torch.float64 else 1e-3)


class Places(nn.Module):
    """A class token and rows of an image, each with its part of the places, and both once more behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4)), nn.Linear(4, K)

    def forward(self, x):
        token = (self.token + self.places[:, :1]).expand(len(x), -1, -1)
        return self.head(torch.cat([token, torch.tanh(x + self.places[:, 1:])], 1).tanh().add(self.places).mean(1))


def test_bare_uses_in_one_order_keep_their_closed_form():
    torch.manual_seed(0)
    model, batch = Places().double(), (torch.randn(9, 3, 4).double(), torch.randint(0, K, (9,)))
    assert plan(model, batch).named("closed form") == ["places", "head.weight", "head.bias"]
    check(model, [batch])


class Steps(nn.Module):
    """A faint scale, made of a parameter, on rows step by step; and a parameter whose true shape an operation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.row, self.head = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1, 4)), nn.Linear(4, K)

    def forward(self, x):
        steps = (x.transpose(0, 1).reshape(-1, 4) * self.scale.exp()).view(x.shape[1], len(x), 4).transpose(0, 1)
        return self.head((torch.tanh(F.linear(x, self.row.expand(4, 4))) + 1e-9 * steps)[:, -1])


def test_an_order_that_the_values_tell_is_the_only_one():
    """Of tiny samples the other order gives the same but for rounding, and so does one that is alone among them."""
    torch.manual_seed(0)
    model, x, y = Steps().eval(), torch.randn(12, 3, 4), torch.randint(0, K, (12,))
    x[:3] *= 1e-7
    found = diagonal(model, list(zip(x.split(4), y.split(4), strict=True))).sums
    assert reference.worst_error(found, reference.fisher(copy.deepcopy(model).double(), (x.double(), y))) <= 1e-3


class Distances(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.prototypes, self.head = scale, nn.Parameter(torch.randn(4, 4) / 2), nn.Linear(4, K)

    def forward(self, x):
        return self.head(torch.tanh(x) + self.scale * torch.cdist(x[None], self.prototypes[None])[0])


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.float32), (1e-6, torch.float32), (1.0, torch.float64)])
def test_distances_for_several_cotangents(scale, dtype):
    """torch.func is right for one, and wrong for as many as the expected kind has."""
    for seed in range(4):
        torch.manual_seed(seed)
        model, x, y = Distances(scale).to(dtype).eval(), torch.randn(8, 4).to(dtype), torch.zeros(8, dtype=torch.int64)
        found = diagonal(model, [(x, y)], kind="expected").sums
        expected = reference.fisher(copy.deepcopy(model).double(), (x.double(), y), "expected")
        assert reference.worst_error(found, expected) <= (1e-10 if dtype == torch.float64 else 1e-4)
