"""Dampen weights by how much they move the size of the model's outputs, which needs no labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expunge import fisher
from expunge.data.batches import Data
from expunge.data.objective import Batch
from expunge.editing.patches import Patch
from expunge.fisher import FisherSums
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.dampening import dampened, warn_if_unchanged
from expunge.training.tuning import Tuning
from expunge.validate import check_number, make_plain

Norm = Callable[[Tensor, Tensor], Tensor]  # of each sample's outputs, in the form of a loss


@dataclass(frozen=True)
class LFSSD:
    """Label-free selective synaptic dampening: `SSD` with an importance of the outputs alone, whatever the labels and the loss.

    Ω_j = mean_n |∂‖z_n‖² / ∂w_j|, z_n the outputs of sample n; w_j ← min(λ·Ω_D,j / Ω_f,j, 1)·w_j where Ω_f,j > α·Ω_D,j. `threshold` is
    α, `dampening` λ. Foster et al. 2024, arXiv:2402.19308.

    α must be below n/n_f, as with `SSD`, and absolute values are nearer to each other than squares are: take a lower one.

    Defaults: those of `SSD`; no fine-tuning.
    Departures: their program takes |∂ mean_n ‖z_n‖²| of each batch, in which samples cancel and which depends on the order of the data;
    here it is one gradient per sample. Outputs with positions, (N, K, ...), are one vector per sample.
    """

    threshold: float = 10.0
    dampening: float = 1.0
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for argument, value in (("threshold", self.threshold), ("dampening", self.dampening)):
            check_number(argument, value, 0, ends="[]", rule="must be 0 or more")
        check_tuning(self.tuning)
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "LFSSD")
        forget_sums = output_importance(model, forget, "forget", run, squared_norms)
        all_sums = forget_sums + output_importance(model, remain, "remain", run, squared_norms)
        patch = run.edit(model, dampened(model, forget_sums.mean(), all_sums.mean(), self.threshold, self.dampening))
        warn_if_unchanged(patch)
        run.train(model, remain, self.tuning)
        return patch


def output_importance(model: nn.Module, data: Data, argument: str, run: Run, norm: Norm) -> FisherSums:
    """Σ_n |∂ norm(z_n)/∂w|, and the number of samples."""
    objective = replace(run.objective, losses=norm, targets=_no_targets, classes=False)
    return fisher.absolute(model, run.batches(data, argument), objective, run.progress)


def squared_norms(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖z_n‖² of each sample, all its outputs being one vector."""
    return outputs.reshape(len(outputs), -1).square().sum(1)


def norms(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖z_n‖ of each sample; its gradient at 0 is 0."""
    return torch.linalg.vector_norm(outputs.reshape(len(outputs), -1), dim=1)


def _no_targets(batch: Batch) -> Tensor:
    return torch.empty(0)
