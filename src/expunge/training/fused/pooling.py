# mypy: disable-error-code="no-untyped-def"
"""Max pooling over 3x3 positions of images whose channels lie side by side: which position was the largest is kept as one byte."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ENTRIES = 1024  # of a block: positions by channels
KERNEL, PADDING = 3, 1


def max_pool(x: Tensor, stride: int) -> Tensor:
    return _MaxPool.apply(x, stride)


def forward(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The pooled images, and of each value which of the nine positions it was at."""
    samples, channels, height, width = x.shape
    shape = samples, channels, *((size + 2 * PADDING - KERNEL) // stride + 1 for size in (height, width))
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    largest = torch.empty_like(out, dtype=torch.uint8)
    _launch(_forward, out, (x, out, largest), x, stride)
    return out, largest


def backward(gradient: Tensor, largest: Tensor, back: Tensor, stride: int, add: bool = False) -> None:
    """Write the gradient of the images to `back`; with `add` add it to what is there."""
    largest = largest.contiguous(memory_format=torch.channels_last)  # where it was kept elsewhere meanwhile
    _launch(_backward, back, (gradient, back, largest), gradient, stride, ADD=add)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        out, largest = forward(x.contiguous(memory_format=torch.channels_last), stride)
        ctx.save_for_backward(largest)
        ctx.stride, ctx.shape = stride, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (largest,) = ctx.saved_tensors
        back = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
        backward(gradient.contiguous(memory_format=torch.channels_last), largest, back, ctx.stride)
        return back, None


def _launch(kernel: Any, over: Tensor, tensors: tuple[Tensor, ...], read: Tensor, stride: int, **options: bool) -> None:
    """A program for some positions of the images `over` and some channels; those of `read` are of another size."""
    samples, channels, lines, across = over.shape
    wide = min(64, triton.next_power_of_2(channels))
    high, unit = ENTRIES // wide, 8 if channels % 8 == 0 else 1
    positions = samples * lines * across
    kernel[(triton.cdiv(positions, high), triton.cdiv(channels, wide))](
        *tensors, positions, lines, across, *read.shape[2:], channels // unit,
        UNIT=unit, HIGH=high, WIDE=wide, STRIDE=stride, KERNEL=KERNEL, PADDING=PADDING, **options,
    )  # fmt: skip


SIZES = "positions lines across height width units".split()


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, out, largest, positions, lines, across, height, width, units,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    position, channel = tl.program_id(0) * HIGH + tl.arange(0, HIGH), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (position < positions)[:, None] & (channel < channels)[None, :]
    sample, line, place = position // (lines * across), position // across % lines, position % across
    best = tl.full((HIGH, WIDE), float("-inf"), tl.float32)
    which = tl.full((HIGH, WIDE), KERNEL * KERNEL // 2, tl.int32)
    for down in tl.static_range(KERNEL):
        for along in tl.static_range(KERNEL):
            y, z = line * STRIDE + down - PADDING, place * STRIDE + along - PADDING
            there = inside & ((y >= 0) & (y < height) & (z >= 0) & (z < width))[:, None]
            source = ((sample * height + y) * width + z).to(tl.int64)[:, None] * channels + channel[None, :]
            value = tl.load(x + source, mask=there, other=float("-inf")).to(tl.float32)
            which = tl.where(value > best, down * KERNEL + along, which)
            best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    target = position.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside)
    tl.store(largest + target, which.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _backward(
    gradient, back, largest, positions, lines, across, height, width, units,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Each position of the input adds up the gradients of the outputs whose largest it was."""
    channels = units * UNIT
    position, channel = tl.program_id(0) * HIGH + tl.arange(0, HIGH), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (position < positions)[:, None] & (channel < channels)[None, :]
    sample, line, place = position // (lines * across), position // across % lines, position % across
    target = position.to(tl.int64)[:, None] * channels + channel[None, :]
    total = tl.zeros((HIGH, WIDE), tl.float32)
    if ADD:
        total += tl.load(back + target, mask=inside, other=0.0).to(tl.float32)
    for above in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):
        for left in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):
            y, z = (line + PADDING) // STRIDE - above, (place + PADDING) // STRIDE - left
            down, along = line + PADDING - y * STRIDE, place + PADDING - z * STRIDE
            seen = (down < KERNEL) & (along < KERNEL) & (y >= 0) & (z >= 0) & (y < height) & (z < width)
            source = ((sample * height + y) * width + z).to(tl.int64)[:, None] * channels + channel[None, :]
            there = inside & seen[:, None]
            which = tl.load(largest + source, mask=there, other=255).to(tl.int32)
            value = tl.load(gradient + source, mask=there, other=0.0).to(tl.float32)
            total += tl.where(which == (down * KERNEL + along)[:, None], value, 0.0)
    tl.store(back + target, total.to(back.dtype.element_ty), mask=inside)
