"""Find where the stages of a model for images end: the last outputs of each resolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from expunge.data.batches import device_of, first_samples, to_device
from expunge.data.objective import Batch, Objective
from expunge.errors import ModelError
from expunge.model.checks import check_module
from expunge.runtime.modes import eager, in_mode, seeded, unchanged


def stage_ends(model: nn.Module, batch: Batch, objective: Objective = Objective()) -> tuple[str, ...]:
    """The names of the modules that are the last to give pictures (N, C, H, W) of each size, in the order in which the sizes come.

    Of a ResNet these are its stages, of a VGG what comes before each pool. Raises `ModelError` where no module gives pictures.
    """
    check_module(model)
    last: dict[tuple[int, ...], str] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() == 4:
                last[tuple(output.shape[2:])] = name

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with in_mode(model, training=False), seeded(0, device_of(model)), torch.no_grad(), eager(), unchanged(model):
            objective.logits(model, to_device(first_samples(batch), device_of(model)))
    finally:
        for hook in hooks:
            hook.remove()
    if not last:
        raise ModelError("model: has no module that gives pictures (N, C, H, W); name the modules to look at")
    return tuple(last.values())
