"""A BatchNorm in train mode and the ReLU behind it as one operation: two kernels forward, two backward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from expunge.training.fused import CHANNELS, kernels
from expunge.training.fused.kernels import Norm, Running, Slopes

_finished: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def relu_of_norm(norm: nn.BatchNorm2d, x: Tensor, added: Tensor | None, left_out: Tensor | None = None) -> Tensor:
    """relu(norm(x) + added); `left_out`: a bias that x lacks, in the running mean alone."""
    return _ReluOfNorm.apply(x, norm.weight, norm.bias, added, left_out, norm)


def rows(images: Tensor) -> Tensor:
    """(N, C, H, W) as (N·H·W, C), channels side by side: a view where they are so in memory."""
    flat = images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def empty_like(images: Tensor) -> Tensor:
    return torch.empty(images.shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)


def finished(norm: nn.Module, device: torch.device) -> Tensor:
    """A norm's own counters: networks that train side by side must not share them."""
    if norm not in _finished or _finished[norm].device != device:
        _finished[norm] = torch.zeros(CHANNELS, dtype=torch.int32, device=device)
    return _finished[norm]


def images(flat: Tensor, like: Tensor) -> Tensor:
    """(N·H·W, C) as (N, C, H, W), a view."""
    samples, _, height, width = like.shape
    return flat.unflatten(0, (samples, height, width)).permute(0, 3, 1, 2)


def running(norm: nn.BatchNorm2d, left_out: Tensor | None = None) -> Running:
    mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and variance is not None and batches is not None and norm.momentum is not None
    return Running(mean, variance, batches, norm.momentum, left_out)


def normed(norm: nn.BatchNorm2d, x: Tensor, out: Tensor, added: Tensor | None = None, left_out: Tensor | None = None) -> Norm:
    """Write relu(norm(x) + added) of rows to `out`, and move the running statistics."""
    mean, variance = x.new_empty((2, len(norm.weight)), dtype=torch.float32)
    kernels.statistics(x, mean, variance, finished(norm, x.device))
    values = Norm(mean, variance, norm.weight, norm.bias, norm.eps)
    kernels.apply(x, values, out, running(norm, left_out), added)
    return values


def backward(
    norm: nn.BatchNorm2d, values: Norm, x: Tensor, gradient: Tensor, back: Tensor, out: Tensor | None = None, of_added: Tensor | None = None
) -> Slopes:
    """Write the gradient of x to `back`; that of γ and β is returned. `out`: what the forward pass wrote, where something was added."""
    slopes = Slopes(*values.mean.new_empty((2, len(values.mean))))
    kernels.sums(x, gradient, values, slopes, finished(norm, x.device), out)
    kernels.backward(x, gradient, values, slopes, back, out, of_added)
    return slopes.as_parameters(values)


class _ReluOfNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, left_out: Tensor | None, norm: nn.BatchNorm2d
    ) -> Tensor:
        out = empty_like(x)
        values = normed(norm, rows(x), rows(out), None if added is None else rows(added), left_out)
        ctx.save_for_backward(x, weight, bias, values.mean, values.variance, None if added is None else out, left_out)
        ctx.norm = norm
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, out, left_out = ctx.saved_tensors
        back, of_added = empty_like(x), None if out is None else empty_like(x)
        outputs, to_added = (None if images is None else rows(images) for images in (out, of_added))
        values = Norm(mean, variance, weight, bias, ctx.norm.eps)
        slopes = backward(ctx.norm, values, rows(x), rows(gradient), rows(back), outputs, to_added)
        return back, slopes.weight, slopes.bias, of_added, None if left_out is None else torch.zeros_like(left_out), None
