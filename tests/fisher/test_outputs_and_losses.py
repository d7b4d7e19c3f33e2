"""Models that return all sorts of things, losses with settings of their own, and types narrower than float64, against the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge import fisher
from expunge.data.objective import Objective
from expunge.errors import ModelError
from expunge.fisher import diagonal
from tests import reference
from tests.fisher.patterns import K, labels
from tests.fuzz.modules.definition import defined


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor | None = None


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Returning(nn.Module):
    def __init__(self, form) -> None:
        super().__init__()
        self.layer, self.head, self.form = nn.Linear(5, 6), nn.Linear(6, K), form

    def forward(self, x):
        hidden = torch.tanh(self.layer(x))
        return self.form(self.head(hidden), hidden)


def batches(samples: int = 9, dtype: torch.dtype = torch.float64):
    return [(torch.randn(samples, 5).to(dtype), labels(samples)) for _ in range(2)]


def check(model: nn.Module, data, objective: Objective | None = None, limit: float = 1e-10) -> None:
    objective = objective or Objective()
    for kind in ("empirical", "expected") if objective.of_classes else ("empirical",):
        expected = defined(model, data, objective, kind)
        assert reference.worst_error(diagonal(model, data, kind=kind, objective=objective).sums, expected) <= limit


FORMS = {
    "dataclass": Answer,
    "dict": lambda logits, hidden: {"loss": None, "logits": logits, "hidden": hidden},
    "named tuple": Pair,
    "tuple": lambda logits, hidden: (logits, hidden),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_models_return(form):
    torch.manual_seed(0)
    check(Returning(FORMS[form]).double(), batches())


def test_outputs_of_two_heads():
    torch.manual_seed(0)
    both = Objective(outputs=lambda model, batch: (lambda out: out["main"] + 0.3 * out["other"])(model(batch[0])))
    check(Returning(lambda logits, hidden: {"main": logits, "other": hidden[:, :K]}).double(), batches(), both)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.7]).double()
LOSSES = {
    "class weights": lambda logits, targets: F.cross_entropy(logits, targets, WEIGHTS, reduction="none"),
    "label smoothing": lambda logits, targets: F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1),
    "ignored labels": lambda logits, targets: F.cross_entropy(logits, targets, reduction="none", ignore_index=0),
    "margins": lambda logits, targets: F.multi_margin_loss(logits, targets, reduction="none"),
    "squares": lambda logits, targets: (logits - F.one_hot(targets, K)).square().sum(1),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("samples", [9, 40])
def test_losses(name, samples):
    torch.manual_seed(0)
    data = batches(samples)
    data[0][1][:2] = 0  # the first two are ignored, where that label is
    check(Returning(lambda logits, hidden: logits).double(), data, Objective(losses=LOSSES[name]))


def test_losses_divided_by_a_samples_own_tokens():
    torch.manual_seed(0)
    targets = torch.randint(0, K, (6, 7)).masked_fill(torch.arange(7)[None] >= torch.tensor([7, 7, 2, 1, 5, 3])[:, None], -100)

    def mean(logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        return losses.sum(1) / (targets != -100).sum(1)

    data = [(torch.randn(6, 5, 7).double(), targets), (torch.randn(6, 5, 7).double(), targets.flip(0))]
    check(nn.Conv1d(5, K, 1).double(), data, Objective(losses=mean, classes=False))


class Mixed(nn.Module):
    """Half of it in bfloat16, by autocast inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = torch.tanh(self.layer(x))
        return self.head(hidden.float())


class Rounding(nn.Module):
    """float32 between inputs and outputs in float64: its rounding is no coupling of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 64), nn.Linear(64, K).double()

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.float())).double())


NARROW = {
    "float32 inside": (Rounding, torch.float64, 1e-5),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, K)).bfloat16(), torch.bfloat16, 3e-2),
    "float16": (lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, K)).half(), torch.float16, 5e-3),
    "autocast inside": (Mixed, torch.float32, 1e-2),
    "float32": (lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, K)), torch.float32, 1e-5),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_types_equal_the_loop_in_the_same_type(name):
    torch.manual_seed(0)
    build, dtype, limit = NARROW[name]
    check(build(), batches(64 if dtype.itemsize > 2 else 9, dtype), limit=limit)  # the loop's own sums are as narrow


class WithoutGradient(nn.Linear):
    def __init__(self, how) -> None:
        super().__init__(5, K)
        self.how = how

    def forward(self, x):
        if self.how in (torch.no_grad, torch.inference_mode):
            with self.how():
                return super().forward(x)
        return self.how(super().forward(x))


@pytest.mark.parametrize("kind", ["empirical", "expected", "batch", "absolute"])
@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, torch.Tensor.detach])
def test_outputs_without_any_gradient_are_refused(how, kind):
    model, batch = WithoutGradient(how).double(), (torch.randn(6, 5).double(), labels(6))
    for batches in ([batch], list(zip(*(part.split(1) for part in batch), strict=True))):
        with pytest.raises(ModelError, match="must have a gradient by its parameters; found none"):
            fisher.absolute(model, batches) if kind == "absolute" else diagonal(model, batches, kind=kind)


def test_parameters_that_the_output_does_not_use_are_zero():
    model = nn.ModuleDict({"head": nn.Linear(5, K), "other": nn.Linear(5, K)}).double()
    objective = Objective(outputs=lambda model, batch: model["head"](batch[0]))
    batch = torch.randn(6, 5).double(), labels(6)
    sums = diagonal(model, [batch], parameters=["other.weight"], objective=objective).sums
    assert not sums["other.weight"].any()


class Squeezed(nn.Module):
    """One number per sample, without a dimension for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(x))).squeeze(-1)


@pytest.mark.parametrize("losses", [nn.BCEWithLogitsLoss(reduction="none"), nn.MSELoss(reduction="none")], ids=["flags", "numbers"])
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_outputs_may_be_one_number_per_sample(losses, size):
    torch.manual_seed(0)
    model, objective = Squeezed().double(), Objective(losses=losses, classes=False)
    x, y = torch.randn(40, 5).double(), torch.randint(2, (40,)).double()
    batches = list(zip(x.split(size), y.split(size), strict=True))
    found = diagonal(model, batches, objective=objective).sums
    assert reference.worst_error(found, defined(model, batches, objective, "empirical")) <= 1e-10
    assert fisher.absolute(model, batches, objective=objective).count == 40
