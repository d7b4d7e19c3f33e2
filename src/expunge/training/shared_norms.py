"""Let BatchNorm take the statistics of the whole batch where processes hold parts of it, on the CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from expunge.runtime.modes import eager

AddUp = Callable[[Tensor], Tensor]
Counted = Callable[[], bool]  # whether this process's samples count, or stand in for none


@contextmanager
def synchronised(model: nn.Module, add_up: AddUp, counted: Counted = lambda: True) -> Iterator[None]:
    """Within the context the BatchNorms of a model that are in train mode normalise by the mean and the variance over all processes.

    m = Σ_r Σ x / n,  v = Σ_r Σ (x − m)² / n,  y = (x − m) / √(v + ε) · weight + bias,  as one process has them for the whole batch, with
    the gradients through m and v. torch's SyncBatchNorm, which exists for GPUs alone, stays as it is.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)]
    before = [norm.__dict__.get("forward") for norm in norms]
    for norm in norms:
        norm.forward = partial(_forward, norm, norm.forward, add_up, counted)  # type: ignore[method-assign]
    try:
        with eager():
            yield
    finally:
        for norm, forward in zip(norms, before, strict=True):
            del norm.forward
            if forward is not None:  # the user's own, of this one module
                norm.forward = forward  # type: ignore[method-assign]


def _forward(norm: Any, original: Callable[[Tensor], Tensor], add_up: AddUp, counted: Counted, inputs: Tensor) -> Tensor:
    if not (norm.training or norm.running_mean is None):
        return original(inputs)
    norm._check_input_dim(inputs)
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    places = [0, *range(2, inputs.dim())]
    shape, own = (1, -1, *(1,) * (inputs.dim() - 2)), float(counted())
    size = wide.new_tensor([own * inputs.numel() / inputs.shape[1]])
    totals = _Sum.apply(torch.cat([own * wide.sum(places), size]), add_up)
    count = totals[-1].detach()
    if inputs.shape[0] <= 1 and count.item() <= 1:  # with two samples here there are two values, and nothing need be read from a GPU
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {inputs.shape}")  # as torch
    mean = totals[:-1] / count
    centred = wide - mean.view(shape)
    variance = _Sum.apply(own * centred.square().sum(places), add_up) / count
    if norm.track_running_stats and norm.running_mean is not None:
        _note(norm, mean.detach(), variance.detach() * count / (count - 1).clamp_min(1))
    outputs = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        outputs = outputs * norm.weight.view(shape) + norm.bias.view(shape)
    return outputs.to(inputs.dtype)


def _note(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics as torch does: by the momentum, or to the mean over all batches where it is None."""
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean.to(norm.running_mean), share)
        norm.running_var.lerp_(variance.to(norm.running_var), share)


class _Sum(torch.autograd.Function):
    """The sum over all processes; the gradient is the sum of theirs, since each part reaches the loss of every process."""

    @staticmethod
    def forward(context: Any, values: Tensor, add_up: AddUp) -> Tensor:
        context.add_up = add_up
        return add_up(values.clone())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.add_up(gradient.clone()), None
