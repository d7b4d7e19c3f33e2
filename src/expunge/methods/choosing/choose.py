"""Choose a method by what there is, try settings in turn until the goal is met, and tell why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.errors import InputError, ModelError
from expunge.methods.choosing.budget import Budget
from expunge.methods.choosing.choice import Choice
from expunge.methods.choosing.rates import find_pace
from expunge.methods.choosing.rungs import ladder, on_forget_data, without_reset
from expunge.methods.choosing.situation import seen
from expunge.methods.choosing.trials import Result, Trials
from expunge.methods.context import Run
from expunge.training.sharing import is_shared
from expunge.validate import check_number, check_positive, check_seed, make_plain


@dataclass(frozen=True)
class Choose:
    """Choose a method and its settings: try one after the other, from the original weights each, until one meets the goal.

    The goal: accuracy on held-out data (`validation`, else a part of the remain data that is never trained on) falls by no more than
    `max_drop`; of a class no label is left; samples look like data that were never seen, by their losses and accuracy, which only
    `validation` can tell. The settings tried are those of results/trials: fresh weights in part of the network, distilled from the
    original; without remain data, or with few, a mask. `outcome.choice` tells what was chosen and why. Where nothing met the goal, the
    best there was is returned, marked as such.

    `epochs`: passes over the remain data for everything that is tried; `seconds` by the clock. `rate`: the peak learning rate of the
    original training; None: a few steps at several rates decide.
    """

    epochs: float | None = None
    seconds: float | None = None
    max_drop: float = 0.02
    rate: float | None = None
    seed: int = 0

    takes_validation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_number("epochs", self.epochs, 1, rule="must be at least 1, a pass over the remain data, or None")
        if self.seconds is not None:
            check_number("seconds", self.seconds, 0, ends="()", rule="must be a positive number, or None")
        check_number("max_drop", self.max_drop, 0, 1, ends="[]", rule="must be a fraction in [0, 1]")
        if self.rate is not None:
            check_positive("rate", self.rate)
        check_seed("seed", self.seed)
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch | None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError("model: has no parameter that requires a gradient, nothing can be changed")
        if self.seconds is not None and is_shared():
            raise InputError("seconds", "must be None within training.shared(), where every process has a clock of its own", self.seconds)
        budget = Budget(self.epochs, self.seconds)
        situation = seen(forget, remain, run, self.max_drop, self.seed)
        trials = Trials(model, forget, situation, run, budget, self.seed)
        pace, found = find_pace(model, forget, situation, run, budget, self.rate, self.seed)
        trials.climb(ladder(situation), pace)
        if situation.remain is None and not (trials.results and trials.best().verdict.met is not False):
            trials.climb(on_forget_data(situation), pace)
        # Not for accuracy's sake: what was not reset keeps what it knows by heart of samples held apart, and passes by that.
        if trials.impossible and not (trials.results and trials.best().verdict.forgotten is not False):
            trials.climb(without_reset(situation), pace)
        best = trials.best()
        trials.take(best)
        run.tell(best.method, _choice(best, trials, (*situation.told, *_frozen(model), *found)))
        return best.patch


def _frozen(model: nn.Module) -> tuple[str, ...]:
    """What no method may change is easily forgotten by who asks for it, as the network below adapters."""
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    every = sum(parameter.numel() for parameter in model.parameters())
    return (f"frozen weights, {frozen:,} of {every:,}, stay as they are: what they know is not forgotten",) if frozen else ()


def _choice(best: Result, trials: Trials, told: tuple[str, ...]) -> Choice:
    others = [tried for tried in trials.tried if tried.method != best.label]
    came = trials.situation.judge.told(best.numbers, trials.before)
    reasons = (*told, best.rung.why, came, *(f"tried too: {tried.method}: {tried.result}" for tried in others), *trials.notes)
    return Choice(repr(best.method), best.label, reasons, best.verdict.met, best.verdict.missing, tuple(trials.tried))
