"""Train on the remain data, from the current weights or from fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from expunge.data.batches import Data, device_of
from expunge.errors import InputError
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.model.checks import check_module
from expunge.model.renewal import reset
from expunge.runtime.modes import seeded
from expunge.training.schedules import Steps
from expunge.training.tuning import Tuning
from expunge.validate import check_builder


@dataclass(frozen=True)
class Finetune:
    """Fine-tune the trained network on the remain data, nothing else (section Baselines)."""

    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        check_tuning(self.tuning, "Finetune")

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "Finetune")
        run.train(model, remain, self.tuning)


@dataclass(frozen=True)
class Retrain:
    """Train fresh weights on the remain data: what unlearning is measured against.

    `fresh` builds the network with new weights; without it every module's own `reset_parameters` is called. Frozen parameters
    (`requires_grad=False`) stay: they were not learnt from the data.
    """

    tuning: Tuning = Tuning(schedule=Steps())
    fresh: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        check_tuning(self.tuning, "Retrain")
        check_builder("fresh", self.fresh, "must be a function that builds the network with new weights, or None")

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "Retrain")
        frozen = [(parameter, parameter.detach().clone()) for parameter in model.parameters() if not parameter.requires_grad]
        with seeded(self.tuning.seed, device_of(model)):
            if self.fresh is None:
                reset(model)
            else:
                _take_over(model, built(self.fresh))
        with torch.no_grad():
            for parameter, value in frozen:
                parameter.copy_(value)
        run.train(model, remain, self.tuning)


def built(fresh: Callable[[], nn.Module]) -> nn.Module:
    """The network that a user's function builds."""
    network = fresh()
    check_module(network, "fresh")
    return network


def _take_over(model: nn.Module, fresh: nn.Module) -> None:
    try:
        model.load_state_dict(fresh.state_dict())
    except RuntimeError as error:
        raise InputError("fresh", "must build a network with the same parameters", str(error).splitlines()[-1].strip()) from error
