"""Train with gradients that a loss has taken itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expunge.errors import ModelError


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def carrying(value: Tensor, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> Tensor:
    """A number with this value whose gradient by the parameters is the one given; None stands for parameters without a part in it."""
    pairs = [(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    if not pairs:
        raise ModelError("model: no weight that requires a gradient has a part in what the method lowers")
    carrier = torch.stack([(parameter * gradient.to(parameter.dtype)).sum().to(value) for parameter, gradient in pairs]).sum()
    return value.detach() + (carrier - carrier.detach())
