"""A BatchNorm in train mode and the ReLU behind it as one operation: two kernels forward, two backward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from expunge.training.fused import kernels
from expunge.training.fused.kernels import Norm, Running, Slopes

GROUPS = 256  # of channels of a norm at most
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
        _finished[norm] = torch.zeros(GROUPS, dtype=torch.int32, device=device)
    return _finished[norm]


def running(norm: nn.BatchNorm2d, left_out: Tensor | None = None) -> Running:
    mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and variance is not None and batches is not None and norm.momentum is not None
    return Running(mean, variance, batches, norm.momentum, left_out)


class _ReluOfNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, left_out: Tensor | None, norm: nn.BatchNorm2d
    ) -> Tensor:
        mean, variance = torch.empty((2, len(weight)), dtype=torch.float32, device=x.device)
        flat, out = rows(x), empty_like(x)
        kernels.statistics(flat, mean, variance, finished(norm, x.device))
        kept = running(norm, None if left_out is None else left_out.detach())
        kernels.apply(flat, Norm(mean, variance, weight, bias, norm.eps), rows(out), kept, None if added is None else rows(added))
        ctx.save_for_backward(x, weight, bias, mean, variance, None if added is None else out, left_out)
        ctx.norm = norm
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, out, left_out = ctx.saved_tensors
        values = Norm(mean, variance, weight, bias, ctx.norm.eps)
        flat, slopes = rows(x), Slopes(torch.empty_like(weight), torch.empty_like(bias))
        sent, outputs = rows(gradient), None if out is None else rows(out)
        kernels.sums(flat, sent, values, slopes, finished(ctx.norm, x.device), outputs)
        back, of_added = empty_like(x), None if out is None else empty_like(x)
        kernels.backward(flat, sent, values, slopes, rows(back), outputs, None if of_added is None else rows(of_added))
        return back, slopes.weight, slopes.bias, of_added, None if left_out is None else torch.zeros_like(left_out), None
