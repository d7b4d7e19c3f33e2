# mypy: disable-error-code="no-untyped-def"
"""Run backward through a scale and a shift per channel, as at the end of a norm: input and gradient are read once for all results."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 2112  # sixteen for each of an H200's 132 multiprocessors: enough to keep its memory busy
ENTRIES = 2048  # of a block: positions by channels


def launch(images: Tensor, slopes: Tensor, mean: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    samples, positions, channels = images.shape
    wide, high, groups, splits, share = _parts(samples, positions, channels)
    back = torch.empty_like(slopes)
    sums = images.new_empty((2, splits, samples, channels), dtype=torch.float32)
    unit = math.gcd(channels, 16)  # decides how many channels are read at once
    _backward[(samples, splits, groups)](
        images, slopes, scale if mean is None else mean, scale, back, sums[0], sums[1], samples, positions, channels // unit, share,
        UNIT=unit, HIGH=high, WIDE=wide, CENTRED=mean is not None, num_warps=4,
    )  # fmt: skip
    plain, centred = sums.sum(1) if splits > 1 else sums[:, 0]
    return back, plain, centred


@lru_cache(1024)  # Triton's own integer functions take microseconds each
def _parts(samples: int, positions: int, channels: int) -> tuple[int, int, int, int, int]:
    """Channels and positions of a block, groups of channels, parts of the positions, and the positions of a part."""
    wide = min(128, triton.next_power_of_2(channels))
    high = ENTRIES // wide
    groups = triton.cdiv(channels, wide)
    splits = max(1, min(triton.cdiv(PROGRAMS, samples * groups), triton.cdiv(positions, high)))
    share = max(1, triton.cdiv(triton.cdiv(positions, splits), high)) * high  # whole blocks
    return wide, high, groups, max(1, triton.cdiv(positions, share)), share  # a sequence may be empty


@triton.jit(do_not_specialize=["samples", "positions", "units", "share"])
def _backward(
    images, slopes, mean, scale, back, plain, centred, samples, positions, units, share,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """One program: some positions of a sample, some channels."""
    sample, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels = units * UNIT
    channel = group * WIDE + tl.arange(0, WIDE)
    inside = channel < channels
    middle, factor = tl.load(mean + channel, mask=inside, other=0.0), tl.load(scale + channel, mask=inside, other=0.0)
    middle = middle if CENTRED else tl.zeros_like(middle)
    first = sample.to(tl.int64) * positions * channels
    alone, with_image = tl.zeros((HIGH, WIDE), tl.float32), tl.zeros((HIGH, WIDE), tl.float32)
    for start in range(split * share, tl.minimum(split * share + share, positions), HIGH):
        position = start + tl.arange(0, HIGH)
        place = first + position[:, None] * channels + channel[None, :]
        there = (position < positions)[:, None] & inside[None, :]
        g = tl.load(slopes + place, mask=there, other=0.0).to(tl.float32)
        x = tl.load(images + place, mask=there, other=0.0).to(tl.float32)
        tl.store(back + place, (g * factor[None, :]).to(back.dtype.element_ty), mask=there)
        alone += g
        with_image += g * (x - middle[None, :])
    row = (split.to(tl.int64) * samples + sample) * channels + channel
    tl.store(plain + row, tl.sum(alone, 0), mask=inside)
    tl.store(centred + row, tl.sum(with_image, 0), mask=inside)
