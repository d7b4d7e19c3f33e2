"""Weights that are made, borrowed, tied, hooked or compiled, and passes that are computed again, equal the loop over samples in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils.checkpoint import checkpoint

from expunge import fisher
from expunge.data.objective import Objective
from expunge.errors import ModelError
from tests import reference
from tests.fisher.patterns import K, labels
from tests.fuzz.modules.definition import defined

pytestmark = pytest.mark.filterwarnings(
    "ignore::expunge.errors.SlowFisherWarning", "ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:`torch.jit.*is deprecated"
)


def batches(samples: int = 9):
    return [(torch.randn(samples, 5).double(), labels(samples)) for _ in range(2)]


def between(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), nn.Linear(6, K)).double()


class Layers(nn.Module):
    """Two layers of one size and a head; a subclass says what `forward` does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))


class Borrowing(Layers):
    """The second layer with the weights of the first, which is called, too."""

    def inner(self, x):
        return self.one(torch.tanh(torch.func.functional_call(self.two, {"weight": self.one.weight, "bias": self.one.bias}, (x,))))


class Turning(Layers):
    def inner(self, x):
        return self.two(torch.tanh(torch.func.functional_call(self.one, {"weight": self.two.weight.T}, (x,))))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Cached(Layers):
    """A weight that is made once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.one, "weight", Symmetric())

    def inner(self, x):
        with parametrize.cached():
            return self.one(torch.tanh(self.one(x)))


class Rounded(Layers):
    """Quantised weights with straight-through gradients."""

    def inner(self, x):
        weight = self.one.weight
        return F.linear(x, weight + ((weight * 8).round() / 8 - weight).detach(), self.one.bias) + F.linear(x, self.two.weight.data)


class LowRank(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 5))
        self.one.requires_grad_(False)

    def inner(self, x):
        return F.linear(x, self.one.weight + self.left @ self.right, self.one.bias) + self.two(x)


class Again(Layers):
    """Computed a second time in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def inner(self, x):
        x = checkpoint(self.two, self.one(x), use_reentrant=self.reentrant)
        return checkpoint(self.two, torch.tanh(x), use_reentrant=self.reentrant)


class Alias(Layers):
    """One parameter in two modules, and a module in a plain list beside its own place."""

    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight
        self.listed = [self.two]

    def inner(self, x):
        return self.listed[0](torch.tanh(self.one(x)))


class Generated(Layers):
    """A weight of its own for every sample, and one that is mapped over samples."""

    def inner(self, x):
        return torch.bmm(self.one(x)[:, :, None] * self.two(x)[:, None], x[:, :, None])[:, :, 0] + torch.vmap(self.one)(x)


class Copies(Layers):
    """Parameters that a forward pass writes to without changing them, and one that it brings to a norm."""

    def inner(self, x):
        with torch.no_grad():
            self.one.weight.mul_(1.0)
            self.two.weight.div_(self.two.weight.norm())
        return self.two(torch.tanh(self.one(x)))


class Complex(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 2))

    def inner(self, x):
        return self.one(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=5)) * self.two(x)


def hooked(what) -> nn.Module:
    model = between(nn.Linear(5, 6))
    what(model)
    return model


def stepping(model: nn.Module) -> None:
    """An optimiser step in the backward pass: it must not happen, or be undone."""
    for value in model.parameters():
        optimiser = torch.optim.SGD([value], lr=0.1)
        value.register_post_accumulate_grad_hook(lambda _, optimiser=optimiser: optimiser.step())


MODELS = {
    "spectral norm": lambda: between(parametrizations.spectral_norm(nn.Linear(5, 6))),
    "weight norm": lambda: between(parametrizations.weight_norm(nn.Linear(5, 6))),
    "weight norm, old": lambda: between(weight_norm(nn.Linear(5, 6))),
    "orthogonal": lambda: between(parametrizations.orthogonal(nn.Linear(5, 6))),
    "pruned": lambda: between(prune.random_unstructured(nn.Linear(5, 6), "weight", 0.5)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(between(nn.Linear(5, 6))),
    "copied": lambda: copy.deepcopy(Alias()),
    "compiled": lambda: torch.compile(between(nn.Linear(5, 6)), backend="eager"),
    "traced by fx": lambda: torch.fx.symbolic_trace(between(nn.Linear(5, 6))),
    "traced": lambda: torch.jit.trace(between(nn.Linear(5, 6)), torch.randn(2, 5).double()),
    "hook on a weight": lambda: hooked(lambda model: model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))),
    "hook on a module": lambda: hooked(lambda model: model[2].register_full_backward_hook(lambda _, back, __: (2 * back[0],))),
    "hook on an output": lambda: hooked(lambda model: model[0].register_forward_hook(lambda _, __, out: 1.5 * out)),
    "steps in the backward pass": lambda: hooked(stepping),
    **{each.__name__: each for each in (Borrowing, Turning, Cached, Rounded, LowRank, Again, Alias, Generated, Copies, Complex)},
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_the_loop(name):
    torch.manual_seed(0)
    model, data = MODELS[name]().double().eval(), batches()
    expected = defined(model, data, Objective(), "empirical")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert reference.worst_error(fisher.diagonal(model, data).sums, expected) <= 1e-10
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_compiled_models_keep_their_closed_forms():
    model = torch.compile(between(nn.Linear(5, 6)), backend="eager")
    assert len(fisher.plan(model, batches()[0]).named("closed form")) == 4


def test_a_backward_pass_that_raises_is_refused():
    for samples in (1, 9):
        with pytest.raises(ModelError, match="must be differentiable; its backward pass raised RuntimeError: When use_reentrant=True"):
            fisher.diagonal(Again(reentrant=True).double(), batches(samples))


def test_complex_parameters_are_refused():
    model = between(nn.Linear(5, 6))
    model.phase = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    with pytest.raises(ModelError, match="parameters must be real.*found phase"):
        fisher.diagonal(model, batches())
