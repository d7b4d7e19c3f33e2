# mypy: disable-error-code="no-untyped-def"
"""Compute Σ_n (dW_n)² by tiles: a program holds input by output channels of one kernel tap, and goes through its share of the samples.

Each sample's product is summed over the positions on tensor cores, squared and added in registers: neither image patches nor per-sample
gradients are written to memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4224  # at work at once: 32 for each of an H200's 132 multiprocessors; fewer leave some idle, more write more partial sums
SAMPLES = 256  # that one program adds up one after the other in float32


def launch(
    images: Tensor, slopes: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Tiles of 32 by up to 128 channels were the fastest on an H200 over the layers of ResNets, VGG16, DenseNet and a ViT.

    From 64 input channels on Triton takes Hopper's warp-group instructions, for which it has to turn float32 tiles on their way into shared
    memory, four bytes at a time, and is slower.
    """
    (samples, height, width, wide), (lines, across, out) = images.shape, slopes.shape[1:]
    taps, positions = math.prod(kernel), lines * across
    tile_wide, tile_out, block, warps, tiles, share, splits = _parts(samples, taps, positions, wide, out)
    totals = images.new_empty((splits, taps, wide, out), dtype=torch.float32)
    unit = math.gcd(wide, out, 16)  # what both are a multiple of decides how many channels are read at once
    _squares[(tiles, splits)](
        images, slopes, totals, samples, share, height, width, wide // unit, lines, across, out // unit, taps, kernel[1],
        *stride, *padding, *dilation,
        UNIT=unit, POSITIONS=block, WIDE=tile_wide, OUT=tile_out, ONCE=positions <= block,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return totals.sum(0) if splits > 1 else totals[0]


@lru_cache(1024)  # Triton's own integer functions take microseconds each
def _parts(samples: int, taps: int, positions: int, wide: int, out: int) -> tuple[int, int, int, int, int, int, int]:
    """Channels of a tile, positions read at once, warps of a program, tiles, samples of a program, and programs for all samples."""
    tile_wide, tile_out = _power(wide, 32), _power(out, 128)
    block = _power(positions, 64) if positions <= 64 else 32 if positions >= 128 else 16  # few of them beyond the last position
    warps = {128: 4, 64: 2, 32: 2, 16: 1}[tile_out]
    tiles = taps * triton.cdiv(wide, tile_wide) * triton.cdiv(out, tile_out)
    share = min(SAMPLES, max(1, samples * tiles * warps // WARPS))
    return tile_wide, tile_out, block, warps, tiles, share, triton.cdiv(samples, share)


def _power(size: int, limit: int) -> int:
    """The smallest power of two that is at least `size`, between 16, which tensor cores need, and `limit`."""
    return min(limit, max(16, triton.next_power_of_2(size)))


SIZES = "samples share height width wides lines across outs taps broad down along top side apart between"


@triton.jit(do_not_specialize=SIZES.split())  # one compilation for all sizes: it takes a second
def _squares(
    images, slopes, totals, samples, share, height, width, wides, lines, across, outs, taps, broad, down, along, top, side, apart, between,
    UNIT: tl.constexpr, POSITIONS: tl.constexpr, WIDE: tl.constexpr, OUT: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    wide, out = wides * UNIT, outs * UNIT
    tile, split = tl.program_id(0), tl.program_id(1)
    of_out, of_wide = tl.cdiv(out, OUT), tl.cdiv(wide, WIDE)
    o = (tile % of_out) * OUT + tl.arange(0, OUT)
    i = (tile // of_out % of_wide) * WIDE + tl.arange(0, WIDE)
    tap = tile // (of_out * of_wide)
    first_line, first_place = (tap // broad) * apart - top, (tap % broad) * between - side
    positions, image_size = lines * across, height * width * wide
    first = split * share
    image = images + first.to(tl.int64) * image_size
    slope = slopes + first.to(tl.int64) * (positions * out)
    total = tl.zeros((WIDE, OUT), tl.float32)
    for _ in range(first, tl.minimum(first + share, samples)):
        product = tl.zeros((WIDE, OUT), tl.float32)
        if ONCE:
            a, g = _tiles(
                image, slope, 0, positions, height, width, wide, across, out, down, along, first_line, first_place, i, o, POSITIONS
            )
            product = tl.dot(a, g, product)
        else:
            for start in range(0, positions, POSITIONS):
                a, g = _tiles(
                    image, slope, start, positions, height, width, wide, across, out, down, along, first_line, first_place, i, o, POSITIONS
                )
                product = tl.dot(a, g, product)
        total += product * product
        image += image_size
        slope += positions * out
    place = ((split.to(tl.int64) * taps + tap) * wide + i[:, None]) * out + o[None, :]
    tl.store(totals + place, total, mask=(i < wide)[:, None] & (o < out)[None, :])


@triton.jit
def _tiles(
    image, slope, start, positions, height, width, wide, across, out, down, along, first_line, first_place, i, o, POSITIONS: tl.constexpr
):
    """What the tap sees from POSITIONS positions of a sample, and their gradients; zero outside the image."""
    position = start + tl.arange(0, POSITIONS)
    y = (position // across) * down + first_line
    x = (position % across) * along + first_place
    there = position < positions
    inside = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    a = tl.load(image + (y * width + x)[None, :] * wide + i[:, None], mask=inside[None, :] & (i < wide)[:, None], other=0.0)
    g = tl.load(slope + position[:, None] * out + o[None, :], mask=there[:, None] & (o < out)[None, :], other=0.0)
    return a, g
