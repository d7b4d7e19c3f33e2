"""Train on the remain data, from the current weights or from fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from expunge.data.batches import Data, device_of
from expunge.errors import InputError, ModelError
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.model.checks import check_module
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


def reset(model: nn.Module) -> None:
    """Reset the weights of every module, inner modules first, as they were built; modules frozen as a whole are left alone.

    Raises `ModelError` where a trainable parameter would keep old values; the model is of no use then.
    """
    rule = "fresh weights need reset_parameters on every module with parameters, or `fresh`"
    renewals, unknown = [], []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            continue
        # Attention and transformers of torch name it with an underscore.
        renew = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if renew is not None:
            renewals.append(renew)
        elif own:
            unknown.append(name or "the model itself")
    if unknown:
        raise ModelError(f"model: {rule}; missing in {', '.join(unknown)}")
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A reset that writes elsewhere (pruned, weight-normed and spectral-normed layers have another tensor as weight) leaves these.
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.fill_(torch.nan)
    for renew in reversed(renewals):
        renew()
    if kept := [name for name, parameter in trainable.items() if not torch.isfinite(parameter).all()]:
        raise ModelError(f"model: {rule}; reset_parameters does not reach {', '.join(kept)}")


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
