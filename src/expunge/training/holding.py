"""Keep some weights where they are, or slow them down, while the others are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from expunge.editing.masks import masked_parameters


@contextmanager
def freeze(model: nn.Module, mask: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context masked weights are exactly zero, whatever the optimizer does.

    Masked gradients are zeroed before they are accumulated, so that a clipped norm is that of the weights that move; after each step
    masked weights and the optimizer's state for them are zeroed again (weight decay, momentum, Adam; foreach and fused alike). Weights,
    gradients and state already there are zeroed on entry.

    Departures: the text does not say; in the released program masked weights are free to grow back (no `freeze`).
    """
    with _pinned([(parameter, part, parameter.new_zeros(())) for parameter, part in masked_parameters(model, mask).values()], optimizer):
        yield


@contextmanager
def only(model: nn.Module, mask: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context masked weights alone move: all others keep the bits they have on entry, whatever the optimizer does.

    The counterpart of `freeze`, for weight decay, momentum and Adam alike. Parameters the mask does not name do not move at all.
    """
    parts = dict(masked_parameters(model, mask).values())
    none = {parameter: torch.zeros_like(parameter, dtype=torch.bool) for parameter in model.parameters() if parameter not in parts}
    with _pinned([(parameter, ~part, parameter.detach().clone()) for parameter, part in (parts | none).items()], optimizer):
        yield


@contextmanager
def slow(model: nn.Module, mask: Mapping[str, Tensor], share: float, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context masked weights move by this share of every step, whatever the optimizer, all others by the whole of it.

    w ← w + share·(w_stepped − w): a rate of its own for single weights, which an optimizer has for whole parameters only. (A scaled
    gradient would be no smaller step of Adam's.)
    """
    weights = [(parameter, part, parameter.detach().clone()) for parameter, part in masked_parameters(model, mask).values() if part.any()]

    def note(*_: Any) -> None:
        with torch.no_grad():
            for parameter, _part, before in weights:
                before.copy_(parameter)

    def shorten(*_: Any) -> None:
        with torch.no_grad():
            for parameter, part, before in weights:
                parameter.copy_(torch.where(part, before + share * (parameter - before), parameter))

    hooks: list[Any] = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(shorten)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _pinned(weights: Sequence[tuple[nn.Parameter, Tensor, Tensor]], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Every parameter has these values where its part is true, after every step; gradients and the optimizer's state are zero there."""
    pinned = [(parameter, part, values) for parameter, part, values in weights if part.any()]

    def restore(*_: Any) -> None:
        with torch.no_grad():
            for parameter, part, values in pinned:
                parameter.copy_(torch.where(part, values, parameter))
                for value in optimizer.state.get(parameter, {}).values():
                    # A state of no dimensions is a counter (Adam's step), even beside a parameter of none.
                    if isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                        value.masked_fill_(part, 0)

    restore()
    for parameter, part, _ in pinned:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(part, 0)
    hooks: list[Any] = [optimizer.register_step_post_hook(restore)]
    try:
        for parameter, part, _ in pinned:
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(lambda gradient, part=part: gradient.masked_fill(part, 0)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
