"""How deep in a model its parameters lie: the order in which the model calls the modules that hold them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from expunge.data.batches import device_of, first_samples, to_device
from expunge.data.objective import Batch, Objective
from expunge.model.checks import check_module
from expunge.runtime.modes import eager, in_mode, seeded, unchanged


def last_parameters(model: nn.Module, batch: Batch, share: float, objective: Objective = Objective()) -> tuple[str, ...]:
    """The parameters of the last `share` of the layers, in the model's order.

    A layer is a module with a matrix or convolution of its own; there are L. The last ⌊share · L + ½⌋ of them are taken, one at least
    unless the share is 0, and all that is called after the first of these (norms, scales). With a share of 1 these are all parameters.
    """
    if share >= 1:
        return tuple(name for name, _ in model.named_parameters())
    calls = call_order(model, batch, objective)
    layers = sorted(place for name, place in calls.items() if any(part.dim() > 1 for part in model.get_submodule(name).parameters(False)))
    taken = max(math.floor(share * len(layers) + 0.5), 1) if share and layers else 0
    if not taken:
        return ()
    first = layers[-taken]
    # One that modules share lies where it is last read: a classifier tied to the embedding is the end of the model all the same.
    late = {value for name, value in model.named_parameters(remove_duplicate=False) if calls[name.rpartition(".")[0]] >= first}
    return tuple(name for name, value in model.named_parameters() if value in late)


def call_order(model: nn.Module, batch: Batch, objective: Objective = Objective()) -> dict[str, int]:
    """The modules with parameters of their own, and when each is first called on this batch, counted from 0.

    One that is never called by itself (a matrix that its parent reads, as in attention) has the place of the module around it.
    """
    check_module(model)
    called: dict[nn.Module, int] = {}

    def note(module: nn.Module, inputs: Any) -> None:
        called.setdefault(module, len(called))

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        # With gradients, for without them torch's transformers take a short cut past their own modules.
        with (
            in_mode(model, training=False),
            seeded(0, device_of(model)),
            torch.inference_mode(False),
            torch.enable_grad(),
            eager(),
            unchanged(model),
        ):
            objective.logits(model, to_device(first_samples(batch), device_of(model)))
    finally:
        for hook in hooks:
            hook.remove()
    modules = dict(model.named_modules())

    def place(name: str) -> int:
        while modules[name] not in called and name:
            name = name.rpartition(".")[0]
        return called.get(modules[name], 0)

    return {name: place(name) for name, module in modules.items() if any(True for _ in module.parameters(False))}
