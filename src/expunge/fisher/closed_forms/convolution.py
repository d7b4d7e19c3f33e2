"""Compute Σ_n (dW_n)² of a convolution from its input and the gradient of its output, without a loop over samples.

For sample n, output channel o, input channel i and kernel tap u:  dW_n[o, i, u] = Σ_l g_n[o, l] · a_n[i, l·stride + u·dilation − padding].
All ways below are exact and differ in what they move through memory; `choose` picks by shape alone, so that results repeat bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.fisher.closed_forms import cuda, native, tf32
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.closed_forms.scratch import LARGE_BYTES, Scratch, add_squared_products, add_squares, chunks, summed_products


@dataclass(frozen=True)
class Geometry:
    """A convolution's settings, one entry per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


Way = Callable[[Tensor, Tensor, Geometry, Scratch, str, int], Tensor]


def squares(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """The running total of Σ_n (Σ_frames dW)², in the shape of the weight; `frames` rows that follow each other are one sample's."""
    return choose(inputs, gradients, geometry, frames)(inputs, gradients, geometry, scratch, name, frames)


def choose(inputs: Tensor, gradients: Tensor, geometry: Geometry, frames: int = 1) -> Way:
    """The way for this shape (benchmarks/convolution_ways.py prints the timings behind the thresholds)."""
    taps, positions = math.prod(geometry.kernel), math.prod(gradients.shape[2:])
    wide, out = inputs.shape[1] // geometry.groups, gradients.shape[1] // geometry.groups
    images = inputs.dim() == 4 and frames == geometry.groups == 1
    if images and cuda.takes(inputs, tf32.in_convolutions(), taps, positions, wide, out):
        return by_tiles
    if images and positions > 1 and native.takes(inputs):
        return by_kernel
    if taps == 1:
        return by_taps
    if inputs.device.type != "cpu":
        return by_columns  # few launches, and the copy runs at memory speed
    if positions <= PAIRS:
        return by_taps
    if positions > SMALL and frames == 1 and wide % VECTOR == out % VECTOR == 0:
        return by_groups
    small = taps * wide * out * inputs.element_size() < LARGE_BYTES["cpu"]
    return by_strips if images and geometry.stride[0] == 1 and small else by_columns


def audit(check: Audit, name: str, inputs: Tensor, gradients: Tensor, geometry: Geometry, samples: int) -> None:
    """Add one channel at one tap: dW_n[o, :, u] = Σ_l g_n[o, l] · a_n[:, l·stride + u·dilation − padding], of the channels of o's group."""
    taps = list(itertools.product(*map(range, geometry.kernel)))
    number = int(check.pick * gradients.shape[1] * len(taps))
    channel, tap = number // len(taps), taps[number % len(taps)]
    there, here = _windows(tap, inputs.shape[2:], gradients.shape[2:], geometry)
    if there is None:
        return
    wide, group = inputs.shape[1] // geometry.groups, channel // (gradients.shape[1] // geometry.groups)
    window = inputs[(slice(None), slice(group * wide, (group + 1) * wide), *there)].flatten(2).transpose(1, 2)
    slopes = gradients[:, channel][(slice(None), *here)].flatten(1)
    check.add_tap(name, (channel, slice(None), *tap), slopes.reshape(samples, -1), window.reshape(samples, -1, wide))


SMALL = 64  # output positions
VECTOR = 16  # channels


def by_taps(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """One batched matmul per kernel tap, over the positions where the tap falls inside the image.

    Where a tap sees at most `PAIRS` positions, (Σ_l g_l a_l)² = Σ_{l,l'} g_l g_l' · a_l a_l' is one matmul over all samples.
    """
    images, samples, groups = _last(inputs), inputs.shape[0] // frames, geometry.groups
    slopes = _last(gradients)
    wide, out = images.shape[-1] // groups, slopes.shape[-1] // groups
    total = scratch.total(name, (math.prod(geometry.kernel), groups, out, wide), inputs)
    for index, tap in enumerate(itertools.product(*map(range, geometry.kernel))):
        there, here = _windows(tap, inputs.shape[2:], gradients.shape[2:], geometry)
        if there is None:
            continue
        a = _rows(images[(slice(None), *there)], scratch, "a").view(samples, -1, groups, wide)
        g = _rows(slopes[(slice(None), *here)], scratch, "g").view(samples, -1, groups, out)
        if groups == 1 and _by_pairs(a):
            total[index, 0] += _pairs(a[:, :, 0], g[:, :, 0])
            continue
        add_squared_products(total[index], g.permute(0, 2, 3, 1), a.transpose(1, 2), scratch)
    return total.view(*geometry.kernel, groups * out, wide).movedim((-2, -1), (0, 1))


def by_columns(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """The image patches as rows, channels last, then one batched matmul per chunk of samples."""
    images, samples, groups = _last(_padded(inputs, geometry)), inputs.shape[0] // frames, geometry.groups
    slopes = _last(gradients)
    size, taps = gradients.shape[2:], math.prod(geometry.kernel)
    positions, wide, out = math.prod(size) * frames, images.shape[-1] // groups, slopes.shape[-1] // groups
    steps = images.stride()[1:-1]
    strides = (
        images.stride(0),
        wide * images.stride(-1),
        *(step * stride for step, stride in zip(steps, geometry.stride, strict=True)),
        *(step * dilation for step, dilation in zip(steps, geometry.dilation, strict=True)),
        images.stride(-1),
    )
    total = scratch.total(name, (groups, taps * wide, out), inputs)
    for rows in chunks(samples, groups * positions * taps * wide, inputs):
        part = images[rows.start * frames : rows.stop * frames]
        patches = part.as_strided((len(part), groups, *size, *geometry.kernel, wide), strides)
        if frames > 1:
            patches = patches.unflatten(0, (len(rows), frames)).transpose(1, 2)
        columns = scratch.take("columns", tuple(patches.shape), inputs)
        columns.copy_(patches)
        g = slopes[rows.start * frames : rows.stop * frames].reshape(len(rows), positions, groups, out).transpose(1, 2)
        if groups == 1 and _by_pairs(lines := columns.view(-1, positions, taps * wide)):
            total[0] += _pairs(g[:, 0], lines)
            continue
        add_squared_products(total, columns.view(-1, groups, positions, taps * wide).transpose(2, 3), g, scratch)
    return total.view(groups, *geometry.kernel, wide, out).movedim((-1, -2), (1, 2)).flatten(0, 1)


def by_strips(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """As `by_columns`, with patches one row high: those of the kernel's next row lie further on in the same memory."""
    images, slopes = _last(inputs), _last(gradients)
    (high, broad), (top, side), (down, along) = geometry.kernel, geometry.padding, geometry.dilation
    (_, height, width, wide), (samples, lines, across, out) = images.shape, slopes.shape
    total = scratch.total(name, (high, broad * wide, out), inputs)
    for rows in chunks(samples, max((height + 2 * top) * across * broad * wide, total.numel()), inputs):
        padded = scratch.take("padded", (len(rows), height + 2 * top, width + 2 * side, wide), inputs).zero_()
        padded[:, top : top + height, side : side + width] = images[rows.start : rows.stop]
        whole, line, place, _ = padded.stride()
        strips = scratch.take("columns", (len(rows), padded.shape[1], across, broad, wide), inputs)
        strips.copy_(padded.as_strided(strips.shape, (whole, line, place * geometry.stride[1], place * along, 1)))
        g = slopes[rows.start : rows.stop].view(len(rows), lines * across, out)
        products = scratch.take("products", (high, len(rows), broad * wide, out), inputs)
        for row, product in enumerate(products):
            moved = strips[:, row * down : row * down + lines].view(len(rows), lines * across, broad * wide)
            torch.bmm(moved.transpose(1, 2), g, out=product)
        add_squares(total, products.transpose(0, 1))
    return total.view(high, broad, wide, out).movedim((-1, -2), (0, 1))


def by_groups(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """Samples as groups of one weight-gradient convolution: the library's own kernel, not reduced over the batch."""
    samples, out, wide = inputs.shape[0], gradients.shape[1], inputs.shape[1] // geometry.groups
    shape = (out, wide, *geometry.kernel)
    total = scratch.total(name, shape, inputs)
    for rows in chunks(samples, total.numel(), inputs):
        a, g = (_planes(tensor[rows.start : rows.stop], scratch, name) for name, tensor in (("a", inputs), ("g", gradients)))
        weight = inputs.new_empty(1).expand(len(rows) * out, *shape[1:])  # only its shape is read
        product = torch.ops.aten.convolution_backward.default(
            g.view(1, -1, *g.shape[2:]), a.view(1, -1, *a.shape[2:]), weight, None,
            geometry.stride, geometry.padding, geometry.dilation, False, [0] * len(geometry.kernel),
            len(rows) * geometry.groups, [False, True, False],
        )[1]  # fmt: skip
        add_squares(total, product.view(len(rows), *shape))
    return total


def by_kernel(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """Our own kernel, which reads the channels-last image where it lies and keeps a sample's gradient in registers."""
    settings = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    total = native.squares(_last(inputs), _last(gradients), *settings, scratch, name)
    return total.unflatten(0, geometry.kernel).movedim((-1, -2), (0, 1))


def by_tiles(inputs: Tensor, gradients: Tensor, geometry: Geometry, scratch: Scratch, name: str, frames: int = 1) -> Tensor:
    """The same on CUDA, on tensor cores: as exact as the library's convolutions, in TF32 where these are."""
    images, slopes = _last(inputs), _last(gradients)
    part = cuda.squares(images, slopes, geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    total = scratch.added(name, part.view(*geometry.kernel, images.shape[-1], slopes.shape[-1]))
    return total.movedim((-1, -2), (0, 1))


PAIRS = 4


def _by_pairs(a: Tensor) -> bool:
    return a.shape[1] == 1 or (a.shape[1] <= PAIRS and a.dtype != torch.float64)


def _pairs(a: Tensor, g: Tensor) -> Tensor:
    """Σ_n (Σ_l g_l a_l)² for (N, L, I) and (N, L, O): equal pairs once, unequal ones doubled.

    In float64 where there are several: where the terms of a sum cancel, those of its square cancel to as many digits more.
    """
    kind = torch.promote_types(a.dtype, torch.float32) if a.shape[1] == 1 else torch.float64
    a, g = a.to(kind), g.to(kind)
    first, second = torch.triu_indices(a.shape[1], a.shape[1], device=a.device)
    weight = torch.where(first == second, 1.0, 2.0).to(a.dtype)[:, None]
    left = (g[:, first] * g[:, second] * weight).flatten(0, 1)
    return summed_products(left, (a[:, first] * a[:, second]).flatten(0, 1))


def _rows(window: Tensor, scratch: Scratch, name: str) -> Tensor:
    """A window of the image as rows of channels: itself where it is whole, else a copy in kept memory."""
    return window if window.is_contiguous() else scratch.take(name, tuple(window.shape), window).copy_(window)


def _planes(images: Tensor, scratch: Scratch, name: str) -> Tensor:
    """One plane per channel: itself where it is so, else a copy in kept memory."""
    return images if images.is_contiguous() else scratch.take(name, tuple(images.shape), images).copy_(images)


def _last(images: Tensor) -> Tensor:
    """Channels last, contiguous (no copy where the tensor already is in channels-last memory)."""
    return images.movedim(1, -1).contiguous()


def _padded(inputs: Tensor, geometry: Geometry) -> Tensor:
    if not any(geometry.padding):
        return inputs
    return F.pad(inputs, [side for pad in reversed(geometry.padding) for side in (pad, pad)])


def _windows(tap: tuple[int, ...], image: torch.Size, output: torch.Size, geometry: Geometry) -> tuple[list[slice] | None, list[slice]]:
    """Where a tap falls inside the image: the input positions it reads (None for none), and the output positions it reads them for."""
    there, here = [], []
    for dimension, (index, size, count) in enumerate(zip(tap, image, output, strict=True)):
        stride = geometry.stride[dimension]
        offset = index * geometry.dilation[dimension] - geometry.padding[dimension]
        low = max(0, -(offset // stride))  # the smallest l with l·stride + offset >= 0
        high = min(count, (size - 1 - offset) // stride + 1)
        if high <= low:
            return None, []
        start = low * stride + offset
        there.append(slice(start, start + (high - low - 1) * stride + 1, stride))
        here.append(slice(low, high))
    return there, here
