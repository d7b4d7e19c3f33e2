"""Find a learning rate for a network of which nobody says how it was trained, by a few steps of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from expunge.data.batches import Data
from expunge.data.parting import first_batches
from expunge.editing.patches import own_tensors
from expunge.errors import DivergedError, ModelError
from expunge.methods.context import Run
from expunge.methods.judging import Judge
from expunge.methods.resetting import ResetAndDistil
from expunge.training.schedules import OneCycle
from expunge.training.tuning import Tuning

SGD_RATES = (0.1, 0.03, 0.01)
ADAM_RATES = (3e-3, 1e-3)
STEPS = 48  # of each
NEAR = 1.1  # of the smallest loss: the largest rate within is taken, since a longer training bears more


@dataclass(frozen=True)
class Pace:
    """How to train: the peak of the rate, by stochastic gradient descent or by AdamW."""

    peak: float
    adam: bool = False

    def tuning(self, epochs: int, batch_size: int, seed: int) -> Tuning:
        return Tuning(OneCycle(self.peak, epochs), batch_size=batch_size, seed=seed, optimizer=torch.optim.AdamW if self.adam else None)

    def __str__(self) -> str:
        return f"{self.peak:g} ({'AdamW' if self.adam else 'SGD'})"


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


def paces(rate: float | None, batch_normalised: bool) -> list[Pace]:
    """Those to try: AdamW too where no BatchNorm makes gradient descent easy, as in transformers; a given rate by both."""
    if rate is not None:
        return [Pace(rate), Pace(rate, adam=True)] if rate <= max(ADAM_RATES) else [Pace(rate)]
    adam = [] if batch_normalised else [Pace(peak, adam=True) for peak in ADAM_RATES]
    return [*map(Pace, SGD_RATES), *adam]


@dataclass(frozen=True)
class Search:
    """`losses` on the guard by pace; `seconds` that a step takes; `steps` made in all."""

    pace: Pace
    losses: dict[Pace, float]
    seconds: float
    steps: int
    share: float | None  # of the depth that could be reset, None: nothing


def search(
    model: nn.Module,
    forget: Data,
    remain: Data,
    run: Run,
    judge: Judge,
    among: list[Pace],
    batch_size: int,
    seed: int,
    share: float,
    steps: int = STEPS,
    enough: Callable[[float], bool] = lambda spent: False,
) -> Search:
    """Train each for a few steps from fresh weights in the last `share` of the depth, and take the one with the smallest loss on the guard.

    `enough(seconds)` is asked after each and ends the search.
    """
    start = Weights(model)
    quiet = replace(run, after_epoch=lambda epoch: None, epochs=[], progress=False)
    part = first_batches(remain, "remain", batch_size, steps)
    losses: dict[Pace, float] = {}
    step, made, resettable, began = math.inf, 0, True, time.perf_counter()
    for pace in among:
        started = time.perf_counter()
        try:
            try:
                method = ResetAndDistil(share if resettable else (), tuning=pace.tuning(1, batch_size, seed))
                method(model, forget, part, quiet)
            except ModelError:
                if not resettable:
                    raise
                resettable = False
                start.restore(model)
                ResetAndDistil((), tuning=pace.tuning(1, batch_size, seed))(model, forget, part, quiet)
            step = min(step, (time.perf_counter() - started) / len(part))
            losses[pace] = judge.measure(model).loss
        except DivergedError:
            losses[pace] = math.inf
        finally:
            start.restore(model)
        made += len(part)
        if enough(time.perf_counter() - began):
            break
    return Search(_best(losses), losses, step, made, share if resettable else None)


def _best(losses: dict[Pace, float]) -> Pace:
    least = min(losses, key=losses.__getitem__)
    near = [pace for pace, loss in losses.items() if pace.adam == least.adam and loss <= NEAR * losses[least]]
    return max(near, key=lambda pace: pace.peak, default=least)
