"""Shrink the weights that matter more to the forget data than to all data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from expunge import curvature, fisher
from expunge.artifacts import weights_digest
from expunge.batches import Batches, Data, as_batches
from expunge.checks import screened
from expunge.fisher import FisherSums
from expunge.methods.run import Run, change_and_tune, check_tuning, needs_remain
from expunge.objective import Batch, Objective
from expunge.patches import Patch
from expunge.settings import check_choice, check_number, make_plain
from expunge.tuning import Tuning

RELEASED_BATCH_SIZE = 64


@dataclass(frozen=True)
class SSD:
    """Selective synaptic dampening: shrink each weight by how much less it matters to all data than to the forget data.

    w_j ← min(λ·F̄_D,j / F̄_f,j, 1)·w_j where F̄_f,j > α·F̄_D,j, with F̄ the mean over the forget data and over all data D, the classifier
    included. `threshold` is α, `dampening` λ. Foster et al. 2024, arXiv:2308.07707.

    Beware of the default α where the forget data are many: no weight has F̄_f > (n/n_f)·F̄_D, since D holds the forget data. α must be
    below n/n_f; for one of ten equal classes that is 10, and α = 10 changes next to nothing. See docs/dampening.md for what to take.

    Defaults: α = 10, λ = 1, those of their class removal (of 20 classes or more); no fine-tuning.
    Departures: their program squares gradients of batches: `as_released()`.
    """

    threshold: float = 10.0
    dampening: float = 1.0
    kind: Literal["empirical", "expected", "loss-batch"] = "empirical"
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for argument, value in (("threshold", self.threshold), ("dampening", self.dampening)):
            check_number(argument, value, 0, ends="[]", rule="must be 0 or more")
        check_choice("kind", self.kind, ("empirical", "expected", "loss-batch"))
        check_tuning(self.tuning)
        make_plain(self)

    @classmethod
    def as_released(cls, threshold: float = 10.0, dampening: float = 1.0, tuning: Tuning | None = None) -> SSD:
        """The importance of the authors' released program: squared gradients of the mean loss of batches of 64, averaged over batches."""
        return cls(threshold, dampening, "loss-batch", tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "SSD")

        def measure(data: Data, argument: str) -> FisherSums:
            if self.kind == "loss-batch":
                cut = as_batches(data, argument, RELEASED_BATCH_SIZE)
                return batch_importance(model, screened(cut, argument, run.objective), run.objective)
            batches = run.batches(data, argument)
            return fisher.diagonal(model, batches, kind=self.kind, objective=run.objective, progress=run.progress)

        few = measure(forget, "forget")
        forgotten, everything = few.mean(), (few + measure(remain, "remain")).mean()
        values = {}
        for name, importance in forgotten.items():
            shrunk = (self.dampening * everything[name] / importance).clamp(max=1)
            weight = model.get_parameter(name).detach().double()
            values[name] = torch.where(importance > self.threshold * everything[name], shrunk, 1.0) * weight
        return change_and_tune(model, values, remain, self.tuning, run)


def batch_importance(model: nn.Module, batches: Batches, objective: Objective) -> FisherSums:
    """Σ_b (∂ mean_{n in b} ℓ_n)² over batches b, and their number: a square of a mean, which changes with the batch size."""
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in model.named_parameters() if value.requires_grad}
    for batch in batches:
        gradient, _ = curvature.gradient(model, _alone(batch), objective)
        for name, total in sums.items():
            total.add_(gradient[name].square())
    return FisherSums(sums, len(batches), "loss-batch", weights_digest(model))


def _alone(batch: Batch) -> Batches:
    return Batches(lambda seed: iter([batch]), 1)
