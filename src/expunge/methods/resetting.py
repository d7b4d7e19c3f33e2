"""Give part of a network fresh weights, and let it learn the rest again from the network it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from expunge import fisher
from expunge.data.batches import Data, device_of
from expunge.editing import masks, scores
from expunge.editing.masks import Granularity, Mask
from expunge.editing.patches import Patch
from expunge.errors import ModelError, NoEffectWarning
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.training import built
from expunge.model import heads
from expunge.model.checks import check_names
from expunge.model.depth import last_parameters
from expunge.model.renewal import fresh_values, renewable
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import seeded
from expunge.training.distillation import Distillation
from expunge.training.schedules import OneCycle
from expunge.training.tuning import Tuning
from expunge.validate import check_builder, check_choice, check_flag, check_number, make_plain


@dataclass(frozen=True)
class ByFisher:
    """The share `ratio` of the weights that matter most to the forget data, measured by what they matter to the remain data.

    score_j = F̄_f,j / F̄_r,j (`scores.fisher_ratio`), its mean over a unit; biases, norms and bare parameters that nothing can renew are
    never chosen. A unit is a convolution's
    kernel and a single weight of a matrix, or as `granularity` says. The Fisher information is the sampled one, which costs a single pass
    and chooses as the expected one does (97 % of the same kernels from 5,000 samples, ResNet20 on CIFAR-10).
    """

    ratio: float = 0.6
    kind: Literal["empirical", "expected", "sampled"] = "sampled"
    granularity: Granularity = "kernel"
    include_head: bool = True

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1)
        check_choice("kind", self.kind, ("empirical", "expected", "sampled"))
        check_choice("granularity", self.granularity, Granularity)
        check_flag("include_head", self.include_head)
        make_plain(self)

    def mask(self, model: nn.Module, forget: Data, remain: Data, run: Run, among: Collection[str]) -> Mask:
        head = () if self.include_head else run.head_of(model, forget)
        allowed = tuple(name for name in masks.candidates(model, head, self.include_head, "weights") if name in among)
        if not allowed:
            raise ModelError(
                "model: none of its weights can be given fresh values; give its modules reset_parameters, or ResetAndDistil `fresh`"
            )

        def measure(data: Data, argument: str) -> fisher.FisherSums:
            return fisher.diagonal(
                model, run.batches(data, argument), kind=self.kind, objective=run.objective, parameters=allowed, progress=run.progress
            )

        score = scores.fisher_ratio(measure(forget, "forget"), measure(remain, "remain"))
        return masks.select(score, self.ratio, self.granularity, candidates=allowed)


@dataclass(frozen=True)
class ResetAndDistil:
    """Fresh weights for part of the network, then a short training on the remain data with the original as teacher.

    minimise mean_r (1 − α)·L(z, y) + α·T²·KL(softmax(t/T) ‖ softmax(z/T)), t the original's logits without those of forgotten classes.

    `reset` a share of the depth, counted from the output in the order in which the model calls its layers (0.35 of a ResNet20 is its last
    stage and the classifier); names of parameters and modules; or weights chosen `ByFisher`. `tuning.distillation` has α and T, and may
    name the classes that are forgotten as a whole: then, and without `ByFisher`, the forget data are not read. A tuning without one
    distils by the defaults of `Distillation`. `fresh` builds the network with new weights; without it `reset_parameters` of the modules is
    called. Frozen parameters stay.

    Defaults: those of first trials; results/trials holds them against 52 other settings on validation data.
    """

    reset: float | tuple[str, ...] | ByFisher = 0.35
    tuning: Tuning = Tuning(OneCycle(0.1, 5), distillation=Distillation())
    fresh: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reset", _checked_reset(self.reset))
        check_tuning(self.tuning, "ResetAndDistil")
        check_builder("fresh", self.fresh, "must be a function that builds the network with new weights, or None")

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "ResetAndDistil")
        values = self._new_values(model, forget, remain, run)
        patch = Patch.setting(model, values)
        if why := "" if len(patch) else self._why_nothing(values):
            warnings.warn(f"nothing was reset: {why}", NoEffectWarning, stacklevel=level_of_caller())
        patch.apply(model)
        run.train(model, remain, replace(self.tuning, distillation=self.tuning.distillation or Distillation()))
        return patch

    def _new_values(self, model: nn.Module, forget: Data, remain: Data, run: Run) -> dict[str, Tensor]:
        mask = {}
        if isinstance(self.reset, ByFisher):
            every = tuple(name for name, _ in model.named_parameters())
            mask = self.reset.mask(model, forget, remain, run, renewable(model) if self.fresh is None else every)
        names = tuple(name for name, part in mask.items() if part.any()) or self._names(model, remain, run)
        with seeded(self.tuning.seed, device_of(model)):
            values = fresh_values(model, names, None if self.fresh is None else built(self.fresh))
        if names and not values:
            raise ModelError(f"model: all that is to be reset is frozen, such as {names[0]}; unfreeze it, or reset other weights")
        held = dict(model.named_parameters())
        return {name: torch.where(mask[name], value, held[name].detach()) if name in mask else value for name, value in values.items()}

    def _why_nothing(self, values: Collection[str]) -> str:
        """Why no weight got another value, where that is not what was asked for."""
        if values:
            return "`fresh` built the weights that the model has" if self.fresh is not None else ""
        return f"the ratio {self.reset.ratio:g} chose no weight" if isinstance(self.reset, ByFisher) and self.reset.ratio else ""

    def _names(self, model: nn.Module, remain: Data, run: Run) -> tuple[str, ...]:
        if isinstance(self.reset, ByFisher):
            return ()
        if isinstance(self.reset, tuple):
            return heads.named(model, self.reset, "reset") if self.reset else ()
        return last_parameters(model, next(iter(run.batches(remain, "remain"))), self.reset, run.objective)


def _checked_reset(reset: Any) -> float | tuple[str, ...] | ByFisher:
    if isinstance(reset, ByFisher):
        return reset
    if isinstance(reset, (str, tuple, list)):
        return () if reset in ((), []) else check_names("reset", reset)
    check_number("reset", reset, 0, 1, ends="[]", rule="must be a share of the depth in [0, 1], names of parameters, or a ByFisher")
    return float(reset)
