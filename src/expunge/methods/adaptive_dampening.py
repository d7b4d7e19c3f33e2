"""Dampen the weights with the largest relative importance, as many as the share of the data to forget asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expunge import fisher
from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.dampening import Importance, dampened, warn_if_unchanged
from expunge.training.tuning import Tuning
from expunge.validate import make_plain

TIED = 1e-9  # ratios that are this near, relatively, are the same but for rounding


@dataclass(frozen=True)
class ASSD:
    """Adaptive selective synaptic dampening: `SSD` with the threshold read off the data, without a setting to choose.

    α is the percentile p = 100 − ln(1 + 100·n_f/n) of F̄_f,j / F̄_D,j over all weights j, the classifier's included, and λ = 1: 0.7 % of
    the weights are dampened for 1 % of the data, 2.4 % for a tenth. Schoepf et al. 2024, arXiv:2402.10098.

    Weights that matter to no sample (0/0) take no part. Where more weights than that share the largest ratio (n/n_f for those that matter
    to the forget data alone), all of them are dampened; the strict > would take none.

    Defaults: no fine-tuning.
    Departures: as in `SSD`, one gradient per sample, where their program squares gradients of batches. It also takes the remain data for
    D, so that ratios have no upper limit, and leaves infinite ones out of the percentile; here D is all data, as in the text.
    """

    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        check_tuning(self.tuning)
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "ASSD")
        forget_sums, remain_sums = (
            fisher.diagonal(model, run.batches(data, argument), objective=run.objective, progress=run.progress)
            for data, argument in ((forget, "forget"), (remain, "remain"))
        )
        all_sums = forget_sums + remain_sums
        forgotten, everything = forget_sums.mean(), all_sums.mean()
        threshold = adaptive_threshold(sorted_ratios(forgotten, everything), forget_sums.count / all_sums.count)
        patch = run.edit(model, dampened(model, forgotten, everything, threshold, 1.0))
        warn_if_unchanged(patch)
        run.train(model, remain, self.tuning)
        return patch


def sorted_ratios(forgotten: Importance, everything: Importance) -> Tensor:
    """F̄_f/F̄_D of all weights together, ascending; without those where F̄_D is 0 and so, D holding the forget data, F̄_f is too."""
    parts = [(importance / everything[name])[everything[name] > 0] for name, importance in forgotten.items()]
    return torch.cat(parts).sort().values


def adaptive_threshold(ratios: Tensor, share: float) -> float:
    """The percentile 100 − ln(1 + 100·share) of ratios in ascending order, between two of them by their distance (as NumPy has it).

    Always below the largest ratio, so that something exceeds it. Infinity where there are no ratios.
    """
    if not len(ratios):
        return math.inf
    place = max(0.0, 1 - math.log1p(100 * share) / 100) * (len(ratios) - 1)
    below = int(place)
    low, high = ratios[[below, min(below + 1, len(ratios) - 1)]].tolist()
    return min(low + (place - below) * (high - low), float(ratios[-1]) * (1 - TIED))
