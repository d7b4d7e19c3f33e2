"""Find a learning rate for a network of which nobody says how it was trained, by a few steps of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from expunge.data.batches import Data
from expunge.data.parting import first_batches
from expunge.editing.patches import own_tensors
from expunge.errors import DivergedError, ModelError
from expunge.methods.choosing.budget import Budget
from expunge.methods.choosing.situation import Situation
from expunge.methods.context import Run
from expunge.methods.resetting import ResetAndDistil
from expunge.runtime.progress import track
from expunge.training.carrying import Carried
from expunge.training.keeping import clock
from expunge.training.schedules import OneCycle
from expunge.training.tuning import Tuning

SGD_RATES = (0.03, 0.1, 0.01)  # the first is a guess that does little harm
ADAM_RATES = (3e-3, 1e-3)
SHARE = 0.35  # of the depth that gets fresh weights for the search
STEPS, FEWEST = 48, 12  # steps of each, and how few are of no use
SEARCHED = 0.25  # of the budget that the search may take
GENTLE = 0.01  # where remain data are few
NEAR = 1.25  # of the smallest loss: the largest rate within is taken, since a longer training bears more


@dataclass(frozen=True)
class Pace:
    """How to train: the peak of the rate, by stochastic gradient descent or by AdamW."""

    peak: float
    adam: bool = False

    def tuning(self, epochs: int, batch_size: int, seed: int) -> Tuning:
        return Tuning(OneCycle(self.peak, epochs), batch_size=batch_size, seed=seed, optimizer=torch.optim.AdamW if self.adam else None)

    def __str__(self) -> str:
        return f"{self.peak:.2g} ({'AdamW' if self.adam else 'SGD'})"


class Weights:
    """The parameters and buffers of a model as they are now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: tensor.detach().clone() for name, tensor in own_tensors(model).items()}

    def restore(self, model: nn.Module) -> None:
        tensors = own_tensors(model)
        with torch.no_grad():
            for name, value in self.values.items():
                if name in tensors and tensors[name].shape == value.shape:  # a forward pass may make and reshape caches
                    tensors[name].copy_(value)
        model.zero_grad(set_to_none=True)


def find_pace(
    model: nn.Module, forget: Data, situation: Situation, run: Run, budget: Budget, rate: float | None, seed: int
) -> tuple[Pace, tuple[str, ...]]:
    """The pace to train at, and in words how it was found; no more of the budget is spent on it than a quarter."""
    given = () if rate is None else (f"the rate {rate:g} was given",)
    if situation.remain is None or situation.few:
        return Pace(rate or GENTLE), given if situation.few else ()
    among, steps = _paces(model, rate), min(STEPS, situation.steps)
    if budget.epochs is not None:
        # Whole epochs, since what is left is trained in whole ones.
        steps = min(steps, math.floor(SEARCHED * budget.epochs) * situation.steps // len(among))
    if steps < min(FEWEST, situation.steps):
        among, steps = among[:1], 4
    untimed = budget.seconds is None or (budget.epochs is not None and budget.epochs < 1 + steps / situation.steps)
    if len(among) == 1 and untimed:
        return among[0], given or (f"too few epochs to search for a rate: {among[0]} is a guess",)
    losses = _losses(model, forget, situation, run, budget, among, steps, seed)
    pace = _best(losses)
    if not math.isfinite(losses[pace]):
        raise DivergedError(f"no learning rate of {', '.join(map(str, losses))} trains this network; give a method with its tuning")
    if len(losses) == 1:
        return pace, given or (f"too little time to search for a rate: {pace} is a guess",)
    return pace, (*given, f"rate {pace}: the best of {len(losses)} that were tried for {steps} steps each")


def _paces(model: nn.Module, rate: float | None) -> list[Pace]:
    """Those to try: AdamW too where no BatchNorm makes gradient descent easy; a rate as AdamW's are by both."""
    if rate is not None:
        return [Pace(rate), Pace(rate, adam=True)] if rate <= max(ADAM_RATES) else [Pace(rate)]
    easy = any(isinstance(module, _BatchNorm) for module in model.modules())
    return [*map(Pace, SGD_RATES), *([] if easy else [Pace(peak, adam=True) for peak in ADAM_RATES])]


def _losses(
    model: nn.Module, forget: Data, situation: Situation, run: Run, budget: Budget, among: list[Pace], steps: int, seed: int
) -> dict[Pace, float]:
    """The loss on the guard after a few steps of each, from fresh weights in the last third of the depth where there can be any.

    Ends early where a quarter of the seconds is spent; steps are timed.
    """
    start, quiet = Weights(model), replace(run, after_epoch=lambda epoch: None, epochs=[], progress=False, history=Carried(of_losses=False))
    part = first_batches(situation.remain, "remain", situation.batch_size, steps)
    losses: dict[Pace, float] = {}
    reset: float | tuple[str, ...] = SHARE
    step = math.inf
    for pace in track(among, "trying learning rates", enabled=run.progress):
        if losses and budget.seconds is not None and clock() - budget.began > SEARCHED * budget.seconds:
            break
        started = clock()
        try:
            reset = _short_run(model, forget, part, quiet, reset, pace.tuning(1, situation.batch_size, seed), start)
            step = min(step, (clock() - started) / len(part))
            losses[pace] = situation.judge.measure(model).loss
        except DivergedError:
            losses[pace] = math.inf
        finally:
            start.restore(model)
        budget.spend(len(part) / situation.steps)
        budget.timed(step, situation.steps)
    return losses


def _short_run(
    model: nn.Module, forget: Data, part: Data, run: Run, reset: float | tuple[str, ...], tuning: Tuning, start: Weights
) -> float | tuple[str, ...]:
    """Train, and return what could be reset."""
    try:
        ResetAndDistil(reset, tuning=tuning)(model, forget, part, run)
    except ModelError:
        if reset == ():
            raise
        start.restore(model)
        return _short_run(model, forget, part, run, (), tuning, start)
    return reset


def _best(losses: dict[Pace, float]) -> Pace:
    least = min(losses, key=losses.__getitem__)
    near = [pace for pace, loss in losses.items() if pace.adam == least.adam and loss <= NEAR * losses[least]]
    return max(near, key=lambda pace: pace.peak, default=least)
