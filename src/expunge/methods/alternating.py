"""Alternate ascent on the forget data, by the weights that matter more to them, with descent on the remain data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expunge import fisher
from expunge.data.batches import Data, as_batches
from expunge.data.objective import Batch
from expunge.editing.masks import Mask
from expunge.fisher import FisherSums
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.dampening import batch_importance
from expunge.methods.streams import interleaved
from expunge.model.checks import screened
from expunge.training.loop import Losses, Phase
from expunge.training.schedules import OneCycle
from expunge.training.single_samples import SingleSampleFilter
from expunge.training.tuning import Tuning
from expunge.validate import check_amount, check_choice, check_positive, check_whole, make_plain

RELEASED_BATCH_SIZE = 128
GUARD = 1e-15  # of a coefficient, where a loss is 0


@dataclass(frozen=True)
class SFRon:
    """Saliency forgetting in the remain-preserving manifold, online: a step up on forget data, then some steps down on remain data.

    forget step   w ← w + η·clip(m ⊙ ∇ α·Σ_i c_i·ℓ_i / Σ_i c_i),  c_i = 1/ℓ_i^λ held fixed: samples still known well count most
    remain steps  w ← w − η·∇L_r, `remain_steps` of them
    m_j = 1 where F̄_f,j ≥ γ·F̄_r,j, by the Fisher information of the network as it was

    The remain steps lead the fast forget step back to where the remain loss is low, which stands in for a product with the inverse of its
    Hessian. `threshold` is γ, `forget_weight` α, `smoothing` λ, `max_norm` the largest norm of an ascent's gradient. An epoch is one of
    the remain data; forget batches are cycled. All steps share the optimizer, so in a forget step other weights move by momentum and
    decay. A loss of exactly 0, of a sample learnt by heart, takes all the weight and has no gradient: λ = 0 counts all samples alike.
    Huang et al. 2024, arXiv:2409.19732.

    Defaults: γ = 1, α = 25, λ = 0.5, norm 7, 5 remain steps, rate 0.01 falling to 0, decay 5e-4: their program for 10 % of CIFAR-10. It
    makes 1,500 remain steps of 128 samples there, about 4 epochs.
    Departures: their slow step keeps a share of the weights from before a round; with the program's share of 0 it is left out here. Their
    rate falls as a cosine, and α with it; here the rate falls straight and α stays. Their Fisher information squares gradients of
    batches: `as_released()`.
    """

    threshold: float = 1.0
    forget_weight: float = 25.0
    smoothing: float = 0.5
    max_norm: float = 7.0
    remain_steps: int = 5
    kind: Literal["empirical", "expected", "loss-batch"] = "empirical"
    tuning: Tuning = Tuning(OneCycle(0.01, 4, rise=0.0), weight_decay=5e-4)

    def __post_init__(self) -> None:
        for argument in ("threshold", "forget_weight", "smoothing"):
            check_amount(argument, getattr(self, argument))
        check_positive("max_norm", self.max_norm)
        check_whole("remain_steps", self.remain_steps, minimum=1)
        check_choice("kind", self.kind, ("empirical", "expected", "loss-batch"))
        check_tuning(self.tuning, "SFRon")
        make_plain(self)

    @classmethod
    def as_released(cls, tuning: Tuning = Tuning(OneCycle(0.01, 4, rise=0.0), weight_decay=5e-4)) -> SFRon:
        """The Fisher information of the authors' program: squared gradients of the mean loss of batches of 128, averaged over batches."""
        return cls(kind="loss-batch", tuning=tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "SFRon")
        ascent = _Ascent(model, self._salient(model, forget, remain, run), self.max_norm)

        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            samples, marks = batch
            ascent.is_next = marks.shape[1] > 0
            values = losses(run.objective.outputs(model, samples), run.objective.targets(samples))
            return -self.forget_weight * adaptive_mean(values, self.smoothing) if ascent.is_next else values.mean()

        parts = [as_batches(data, argument, self.tuning.batch_size) for data, argument in ((forget, "forget"), (remain, "remain"))]
        batches = interleaved(parts[0], parts[1], self.remain_steps, SingleSampleFilter(model, run.objective))
        phase = Phase(batches, "remain", loss, itemgetter(0))
        run.train_phases(model, lambda epoch: [phase], self.tuning, ascent.limited)

    def _salient(self, model: nn.Module, forget: Data, remain: Data, run: Run) -> Mask:
        def measure(data: Data, argument: str) -> FisherSums:
            if self.kind == "loss-batch":
                batches = screened(as_batches(data, argument, RELEASED_BATCH_SIZE), argument, run.objective)
                return batch_importance(model, batches, run.objective)
            return fisher.diagonal(model, run.batches(data, argument), kind=self.kind, objective=run.objective, progress=run.progress)

        forget_means, remain_means = measure(forget, "forget").mean(), measure(remain, "remain").mean()
        return {name: mean >= self.threshold * remain_means[name] for name, mean in forget_means.items()}


def adaptive_mean(losses: Tensor, smoothing: float) -> Tensor:
    """Σ_i c_i·ℓ_i / Σ_i c_i with c_i = 1/ℓ_i^λ, through which no gradient flows."""
    coefficients = 1 / (losses.detach().clamp_min(0).pow(smoothing) + GUARD)
    return (coefficients / coefficients.sum() * losses).sum()


@dataclass
class _Ascent:
    """Limits the gradient of the steps that ascend to the salient weights, and its norm."""

    model: nn.Module
    salient: Mask
    max_norm: float
    is_next: bool = False

    @contextmanager
    def limited(self, optimizer: Optimizer) -> Iterator[None]:
        hook = optimizer.register_step_pre_hook(lambda *_: self._limit() if self.is_next else None)
        try:
            yield
        finally:
            hook.remove()

    def _limit(self) -> None:
        for name, part in self.salient.items():
            gradient = self.model.get_parameter(name).grad
            if gradient is not None:
                gradient.mul_(part)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
