"""Dampen ever more weights, each time from the original, until a poison is gone of which only a part is known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.errors import InputError, LostAccuracyWarning, naming
from expunge.methods.adaptive_dampening import adaptive_threshold, sorted_ratios
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.dampening import Importance, dampened
from expunge.methods.label_free_dampening import norms, output_importance
from expunge.metrics.accuracy import tally
from expunge.runtime.callers import level_of_caller
from expunge.training.tuning import Tuning
from expunge.validate import check_number, check_whole, make_plain

START = 1 / 25  # of n_f/n: the size that the search begins with
LOST = 0.05  # of the remain data: from here on a warning


@dataclass(frozen=True)
class Potion:
    """Poison unlearning of which only a part is known: the forget set is a sample of the poison, the rest of it is in the remain data.

    Ω_j = mean_n |∂‖z_n‖ / ∂w_j|, z_n the outputs of sample n: no squares, so that no single sample decides. Weights are dampened as by
    `ASSD`, with Ω for F̄ and a size s for n_f/n, which the true share of the poison is not. The search (PTN) starts at s = n_f/(25·n) and
    takes s ← `growth`·s, always from the original weights, until the accuracy on the forget data, at the labels they have, is at most
    `goal` times the original's. Schoepf et al. 2024, arXiv:2406.09173.

    The search ends after `steps` sizes, or where all weights are dampened that matter more to the forget data than to all. A goal that
    was not reached raises `InputError`, and nothing is changed. If the edit costs remain accuracy, a `LostAccuracyWarning` says how much:
    samples that are like the rest, not a poison, cannot be forgotten in this way.

    Defaults: growth and number of steps are their program's, where the goal is swept from 0 to 0.75; no fine-tuning.
    Departures: their program takes |∂ mean_n ‖z_n‖| of each batch, and the remain data for D; here it is one gradient per sample and D is
    all data. If the goal is not reached it returns the model of the last size without a word.
    """

    goal: float = 0.2
    growth: float = 1.1
    steps: int = 500
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        check_number("goal", self.goal, 0, 1, ends="[)", rule="must be in [0, 1), a share of the accuracy before")
        check_number("growth", self.growth, 1, math.inf, ends="()", rule="must be above 1")
        check_whole("steps", self.steps, minimum=1)
        check_tuning(self.tuning)
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "Potion")
        forget_accuracy, remain_accuracy = (
            partial(_accuracy, model, data, argument, run) for data, argument in ((forget, "forget"), (remain, "remain"))
        )
        before, kept = forget_accuracy(), remain_accuracy()
        forget_sums = output_importance(model, forget, "forget", run, norms)
        all_sums = forget_sums + output_importance(model, remain, "remain", run, norms)
        trials = _trials(model, forget_sums.mean(), all_sums.mean(), self.sizes(forget_sums.count / all_sums.count))
        patch = run.edit(model, _first_below(model, trials, forget_accuracy, self.goal * before, before))
        if self.tuning is None:
            _warn_of_loss(kept, remain_accuracy())
        run.train(model, remain, self.tuning)
        return patch

    def sizes(self, share: float) -> Iterator[float]:
        """What stands for n_f/n, step by step."""
        size = START * share
        for _ in range(self.steps):
            yield size
            size *= self.growth


def _trials(model: nn.Module, forgotten: Importance, everything: Importance, sizes: Iterator[float]) -> Iterator[dict[str, Tensor]]:
    """The dampened weights of each size, without repetitions; below a threshold of 1 no other weight shrinks."""
    ratios, last = sorted_ratios(forgotten, everything), 0
    for size in sizes:
        threshold = adaptive_threshold(ratios, size)
        chosen = int((ratios > max(threshold, 1.0)).sum())
        if chosen > last:
            yield dampened(model, forgotten, everything, threshold, 1.0)
        last = chosen
        if threshold <= 1:
            return


def _first_below(
    model: nn.Module, trials: Iterable[dict[str, Tensor]], accuracy: Callable[[], float], goal: float, before: float
) -> dict[str, Tensor]:
    """The first of these weights with an accuracy of at most the goal; the model has its own again afterwards."""
    lowest = before
    for values in trials:
        trial = Patch.setting(model, values)
        trial.apply(model)
        reached = accuracy()
        trial.revert(model)
        if reached <= goal:
            return values
        lowest = min(lowest, reached)
    rule = f"no size that was tried brings the forget accuracy down to {goal:.1%}; give a higher goal, more steps, or take another method"
    raise InputError("goal", rule, f"{lowest:.1%} at best, {before:.1%} before")


def _accuracy(model: nn.Module, data: Data, argument: str, run: Run) -> float:
    with naming(argument):
        right, labels = tally(model, run.batches(data, argument), run.objective)
    return right / labels


def _warn_of_loss(before: float, after: float) -> None:
    if before - after > LOST:
        fell = f"the accuracy on the remain data fell from {before:.1%} to {after:.1%}"
        advice = "where so many of them are not poison that nobody named, the forget data are too much like the rest"
        warnings.warn(f"{fell} by the dampening that the goal took: {advice}", LostAccuracyWarning, stacklevel=level_of_caller())
