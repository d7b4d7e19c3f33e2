# mypy: disable-error-code="no-untyped-def"
"""The kernels of a BatchNorm and the ReLU behind it, over (rows, channels): a row is one position of one image.

Channels lie side by side in memory; rows may be further apart than they are wide. Where a tensor is read up to a multiple of UNIT, what
lies beyond its channels is not looked at.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UNROLLED: tl.constexpr = tl.constexpr(4)  # blocks of rows that are read at once for a sum
ENTRIES = 2048  # of a block: rows by channels
PARTS = 4096  # sums of parts by channels that the last program adds at once: more would take registers from all of them
PROGRAMS = 256  # that share a sum, two for each multiprocessor of an H200: the last one adds their parts at once
SIZES = "rows channels units share splits row other own".split()


class Norm(NamedTuple):
    """Of every channel: the batch's mean and variance, γ and β; and ε."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor
    eps: float


class Running(NamedTuple):
    """What a BatchNorm keeps for eval mode, moved by the apply kernel; `shift` is a bias that was left out before the norm."""

    mean: Tensor
    variance: Tensor
    batches: Tensor
    momentum: float
    shift: Tensor | None


def statistics(x: Tensor, mean: Tensor, variance: Tensor, finished: Tensor, copy: Tensor | None = None) -> None:
    """Mean and variance, divided by the number of rows, of the first len(mean) channels; `copy`: where to write x as well.

    `finished`: zeros, as many as there are groups of channels, left as zeros.
    """
    rows, channels = len(x), len(mean)
    wide, high, groups, splits, share = _parts(rows, x.shape[1])
    unit = _unit(x, x.shape[1])
    partial = x.new_empty((2, splits, x.shape[1]), dtype=torch.float32)
    _statistics[(splits, groups)](
        x, x if copy is None else copy, partial, finished, mean, variance, rows, channels, x.shape[1] // unit, share, splits,
        x.stride(0) // unit, 0 if copy is None else copy.stride(0),
        UNIT=unit, HIGH=high, WIDE=wide, TALL=PARTS // wide, COPY=copy is not None, num_warps=8,
    )  # fmt: skip


def apply(x: Tensor, norm: Norm, out: Tensor, running: Running | None, added: Tensor | None = None) -> None:
    """out = relu(γ (x − mean) / √(variance + ε) + β + added); zero in channels of `out` beyond those of the norm."""
    unit = _unit(x, out.shape[1], out, added)
    wide, high, groups = _block(out.shape[1])
    kept = running or Running(norm.mean, norm.variance, norm.mean, 0.0, None)
    _apply[(triton.cdiv(len(x), high), groups)](
        x, x if added is None else added, out, *norm[:4], kept.mean, kept.variance, kept.batches,
        norm.mean if kept.shift is None else kept.shift, len(x), len(norm.mean), out.shape[1] // unit, x.stride(0) // unit,
        0 if added is None else added.stride(0) // unit, out.stride(0) // unit, norm.eps, kept.momentum,
        UNIT=unit, HIGH=high, WIDE=wide, ADDED=added is not None, RUNNING=running is not None, SHIFTED=kept.shift is not None,
    )  # fmt: skip


class Slopes(NamedTuple):
    """The gradients of γ and β in float32, and of a dense block's norms: those of the inputs, added up, but for terms that are the same
    factors of every row (`constant`) and of every x − mean (`linear`)."""

    weight: Tensor
    bias: Tensor
    inputs: Tensor | None = None
    constant: Tensor | None = None
    linear: Tensor | None = None

    def as_parameters(self, norm: Norm) -> Slopes:
        return self._replace(weight=self.weight.to(norm.weight.dtype), bias=self.bias.to(norm.bias.dtype))


def sums(x: Tensor, gradient: Tensor, norm: Norm, slopes: Slopes, finished: Tensor, out: Tensor | None = None) -> None:
    """Write the gradients of γ and β; `out`: the outputs, where something was added before the ReLU."""
    wide, high, groups, splits, share = _parts(len(x), gradient.shape[1])
    into = slopes.inputs
    unit = _unit(x, gradient.shape[1], gradient, into, out)
    partial = x.new_empty((2, splits, gradient.shape[1]), dtype=torch.float32)
    _sums[(splits, groups)](
        x, gradient, x if out is None else out, x if into is None else into, partial, finished, *norm[:4], slopes.weight, slopes.bias,
        norm.mean if slopes.constant is None else slopes.constant, norm.mean if slopes.linear is None else slopes.linear,
        len(x), len(norm.mean), gradient.shape[1] // unit, share, splits, x.stride(0) // unit, gradient.stride(0) // unit,
        0 if out is None else out.stride(0) // unit, 0 if into is None else into.stride(0) // unit, norm.eps,
        UNIT=unit, HIGH=high, WIDE=wide, TALL=PARTS // wide, ADDED=out is not None, INTO=into is not None, num_warps=8,
    )  # fmt: skip


def backward(
    x: Tensor, gradient: Tensor, norm: Norm, slopes: Slopes, back: Tensor, out: Tensor | None = None, of_added: Tensor | None = None
) -> None:
    """Write the gradient of x to `back`, from the sums; and that of what was added."""
    unit = _unit(x, x.shape[1], gradient, back, out, of_added)
    wide, high, groups = _block(x.shape[1])
    _backward[(triton.cdiv(len(x), high), groups)](
        x, gradient, x if out is None else out, back, back if of_added is None else of_added, *norm[:4], slopes.weight, slopes.bias,
        len(x), x.shape[1] // unit, x.stride(0) // unit, gradient.stride(0) // unit, 0 if out is None else out.stride(0) // unit,
        back.stride(0) // unit, 0 if of_added is None else of_added.stride(0) // unit, norm.eps,
        UNIT=unit, HIGH=high, WIDE=wide, ADDED=out is not None,
    )  # fmt: skip


def finish(x: Tensor, gradient: Tensor, mean: Tensor, constant: Tensor, linear: Tensor, out: Tensor) -> None:
    """out = gradient − constant − linear (x − mean); zero in channels of `out` beyond those of the mean."""
    wide, high, groups = _block(out.shape[1])
    _finish[(triton.cdiv(len(x), high), groups)](
        x, gradient, mean, constant, linear, out, len(x), len(mean), out.shape[1], x.stride(0), gradient.stride(0), out.stride(0),
        HIGH=high, WIDE=wide,
    )  # fmt: skip


def _unit(x: Tensor, channels: int, *others: Tensor | None) -> int:
    """What the channels and the distances of rows are multiples of: it decides how many channels are read at once."""
    return math.gcd(16, channels, x.stride(0), *(other.stride(0) for other in others if other is not None))


@lru_cache(1024)
def _block(channels: int) -> tuple[int, int, int]:
    """Channels and rows of a block, and groups of channels."""
    sizes = [size for size in (128, 64, 32, 16) if triton.cdiv(channels, size) * size <= channels * 4 // 3]
    wide = sizes[0] if sizes else 16
    return wide, ENTRIES // wide, triton.cdiv(channels, wide)


@lru_cache(1024)
def _parts(rows: int, channels: int) -> tuple[int, int, int, int, int]:
    """For a sum over rows: channels and rows of a block, groups of channels, parts of the rows, and the rows of a part.

    Few channels side by side and many parts, since one program adds the parts of a group up when all others have ended.
    """
    wide = 16 if channels <= 16 else 32
    high, groups = ENTRIES // wide, triton.cdiv(channels, wide)
    splits = max(1, min(PROGRAMS // groups, triton.cdiv(rows, high)))
    share = triton.cdiv(triton.cdiv(rows, splits), high) * high  # whole blocks
    return wide, high, groups, triton.cdiv(rows, share), share


@triton.jit
def _last_of_all(one, two, partial, finished, channel, inside, wide, splits, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Write a part's two sums; whether it was the last part of these channels, and then the sums of all parts."""
    split, group = tl.program_id(0), tl.program_id(1)
    tl.store(partial + split * wide + channel, one, mask=inside)
    tl.store(partial + (splits + split) * wide + channel, two, mask=inside)
    tl.debug_barrier()  # before the others of the program count it as written
    last = tl.atomic_add(finished + group, 1) == splits - 1
    first, second = tl.zeros((WIDE,), tl.float32), tl.zeros((WIDE,), tl.float32)
    if last:
        tl.store(finished + group, 0)
        for start in range(0, splits, TALL):
            part = start + tl.arange(0, TALL)
            place = part[:, None] * wide + channel[None, :]
            there = (part < splits)[:, None] & inside[None, :]
            first += tl.sum(tl.load(partial + place, mask=there, other=0.0, cache_modifier=".cg"), 0)
            second += tl.sum(tl.load(partial + splits * wide + place, mask=there, other=0.0, cache_modifier=".cg"), 0)
    return last, first, second


@triton.jit(do_not_specialize=SIZES)
def _statistics(
    x, copy, partial, finished, means, variances, rows, channels, units, share, splits, row, other,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    split, group = tl.program_id(0), tl.program_id(1)
    wide, row = units * UNIT, row * UNIT
    channel = group * WIDE + tl.arange(0, WIDE)
    inside, own = channel < wide, channel < channels
    row_of_block = tl.arange(0, HIGH)
    some = tl.load(
        x + row_of_block[:, None].to(tl.int64) * row + channel[None, :], mask=(row_of_block < rows)[:, None] & inside[None, :], other=0.0
    ).to(tl.float32)
    pivot = tl.sum(some, 0) / tl.minimum(rows, HIGH)  # about the mean: no digits are lost where it is large
    one, two = tl.zeros((HIGH, WIDE), tl.float32), tl.zeros((HIGH, WIDE), tl.float32)
    for start in tl.range(split * share, tl.minimum(split * share + share, rows), HIGH, loop_unroll_factor=UNROLLED):
        position = start + tl.arange(0, HIGH)
        there = (position < rows)[:, None] & inside[None, :]
        value = tl.load(x + position[:, None].to(tl.int64) * row + channel[None, :], mask=there, other=0.0)
        if COPY:
            copied = (position < rows)[:, None] & own[None, :]
            tl.store(copy + position[:, None].to(tl.int64) * other + channel[None, :], value, mask=copied)
        value = tl.where(there & own[None, :], value.to(tl.float32) - pivot[None, :], 0.0)
        one += value
        two += value * value
    last, one_of_all, two_of_all = _last_of_all(
        tl.sum(one, 0), tl.sum(two, 0), partial, finished, channel, inside, wide, splits, TALL, WIDE
    )
    if last:
        mean = one_of_all / rows
        tl.store(means + channel, pivot + mean, mask=own)
        variance = tl.maximum(two_of_all / rows - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(variances + channel, variance, mask=own)


@triton.jit(do_not_specialize=SIZES)
def _apply(
    x, added, out, means, variances, weights, biases, running_mean, running_variance, batches, shift,
    rows, channels, units, row, other, own, eps, momentum,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ADDED: tl.constexpr, RUNNING: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    block, group = tl.program_id(0), tl.program_id(1)
    wide = units * UNIT
    channel = group * WIDE + tl.arange(0, WIDE)
    there, known = channel < wide, channel < channels
    mean, variance = tl.load(means + channel, mask=known, other=0.0), tl.load(variances + channel, mask=known, other=0.0)
    weight, bias = tl.load(weights + channel, mask=known, other=0.0), tl.load(biases + channel, mask=known, other=0.0)
    if RUNNING:
        if block == 0:
            before = tl.load(running_mean + channel, mask=known, other=0.0)
            moved = mean
            if SHIFTED:
                moved += tl.load(shift + channel, mask=known, other=0.0)
            tl.store(running_mean + channel, before + momentum * (moved - before), mask=known)
            spread = tl.load(running_variance + channel, mask=known, other=0.0)
            unbiased = variance * (rows / (rows - 1.0))
            tl.store(running_variance + channel, spread + momentum * (unbiased - spread), mask=known)
            if group == 0:
                tl.store(batches, tl.load(batches) + 1)
    scale = weight / tl.sqrt(variance + eps)
    position = block * HIGH + tl.arange(0, HIGH)
    place = position[:, None].to(tl.int64)
    inside = (position < rows)[:, None] & there[None, :]
    value = tl.load(x + place * (row * UNIT) + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * scale[None, :] + bias[None, :]
    if ADDED:
        value = value.to(out.dtype.element_ty).to(tl.float32)  # as without the kernel
        value += tl.load(added + place * (other * UNIT) + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.where(known[None, :], tl.where(value < 0.0, 0.0, value), 0.0)  # what is not a number stays
    tl.store(out + place * (own * UNIT) + channel[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*SIZES, "of_out", "of_into"])
def _sums(
    x, gradient, out, into, partial, finished, means, variances, weights, biases, to_weight, to_bias, constant, linear,
    rows, channels, units, share, splits, row, other, of_out, of_into, eps,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, ADDED: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    split, group = tl.program_id(0), tl.program_id(1)
    wide = units * UNIT
    channel = group * WIDE + tl.arange(0, WIDE)
    inside, known = channel < wide, channel < channels
    mean, variance = tl.load(means + channel, mask=known, other=0.0), tl.load(variances + channel, mask=known, other=0.0)
    weight, bias = tl.load(weights + channel, mask=known, other=0.0), tl.load(biases + channel, mask=known, other=0.0)
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = weight / tl.sqrt(variance + eps)
    one, two = tl.zeros((HIGH, WIDE), tl.float32), tl.zeros((HIGH, WIDE), tl.float32)
    for start in tl.range(split * share, tl.minimum(split * share + share, rows), HIGH, loop_unroll_factor=UNROLLED):
        position = start + tl.arange(0, HIGH)
        place = position[:, None].to(tl.int64)
        there = (position < rows)[:, None] & inside[None, :]
        g = tl.load(gradient + place * (other * UNIT) + channel[None, :], mask=there, other=0.0).to(tl.float32)
        value = tl.load(x + place * (row * UNIT) + channel[None, :], mask=there, other=0.0).to(tl.float32)
        value -= mean[None, :]
        if ADDED:
            opened = tl.load(out + place * (of_out * UNIT) + channel[None, :], mask=there, other=0.0).to(tl.float32) > 0.0
        else:
            opened = value * scale[None, :] + bias[None, :] > 0.0
        opened = opened & there & known[None, :]
        g = tl.where(opened, g, 0.0)
        one += g
        two += tl.where(opened, g * value, 0.0)
        if INTO:
            target = into + place * (of_into * UNIT) + channel[None, :]
            before = tl.load(target, mask=there, other=0.0)
            after = (before.to(tl.float32) + g * scale[None, :]).to(into.dtype.element_ty)
            tl.store(target, tl.where(known[None, :], after, before), mask=there)
    last, one_of_all, two_of_all = _last_of_all(
        tl.sum(one, 0), tl.sum(two, 0), partial, finished, channel, inside, wide, splits, TALL, WIDE
    )
    if last:
        tl.store(to_bias + channel, one_of_all, mask=known)
        tl.store(to_weight + channel, two_of_all * inverse, mask=known)
        if INTO:
            before = tl.load(constant + channel, mask=known, other=0.0)
            tl.store(constant + channel, before + scale * one_of_all / rows, mask=known)
            before = tl.load(linear + channel, mask=known, other=0.0)
            tl.store(linear + channel, before + scale * inverse * inverse * two_of_all / rows, mask=known)


@triton.jit(do_not_specialize=[*SIZES, "of_out", "of_added"])
def _backward(
    x, gradient, out, back, to_added, means, variances, weights, biases, to_weight, to_bias,
    rows, units, row, other, of_out, own, of_added, eps,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    block, group = tl.program_id(0), tl.program_id(1)
    channel = group * WIDE + tl.arange(0, WIDE)
    known = channel < units * UNIT
    mean, variance = tl.load(means + channel, mask=known, other=0.0), tl.load(variances + channel, mask=known, other=0.0)
    weight, bias = tl.load(weights + channel, mask=known, other=0.0), tl.load(biases + channel, mask=known, other=0.0)
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = weight / tl.sqrt(variance + eps)
    constant = tl.load(to_bias + channel, mask=known, other=0.0) / rows
    linear = tl.load(to_weight + channel, mask=known, other=0.0) * inverse / rows
    position = block * HIGH + tl.arange(0, HIGH)
    place = position[:, None].to(tl.int64)
    inside = (position < rows)[:, None] & known[None, :]
    g = tl.load(gradient + place * (other * UNIT) + channel[None, :], mask=inside, other=0.0)
    value = tl.load(x + place * (row * UNIT) + channel[None, :], mask=inside, other=0.0).to(tl.float32) - mean[None, :]
    if ADDED:
        opened = tl.load(out + place * (of_out * UNIT) + channel[None, :], mask=inside, other=0.0).to(tl.float32) > 0.0
        tl.store(to_added + place * (of_added * UNIT) + channel[None, :], tl.where(opened, g, 0.0), mask=inside)
    else:
        opened = value * scale[None, :] + bias[None, :] > 0.0
    g = tl.where(opened, g.to(tl.float32), 0.0)
    value = scale[None, :] * (g - constant[None, :] - linear[None, :] * value)
    tl.store(back + place * (own * UNIT) + channel[None, :], value.to(back.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _finish(x, gradient, means, constants, linears, out, rows, channels, units, row, other, own, HIGH: tl.constexpr, WIDE: tl.constexpr):
    block, group = tl.program_id(0), tl.program_id(1)
    channel = group * WIDE + tl.arange(0, WIDE)
    known = channel < channels
    mean = tl.load(means + channel, mask=known, other=0.0)
    constant, linear = tl.load(constants + channel, mask=known, other=0.0), tl.load(linears + channel, mask=known, other=0.0)
    position = block * HIGH + tl.arange(0, HIGH)
    place = position[:, None].to(tl.int64)
    inside = (position < rows)[:, None] & known[None, :]
    value = tl.load(x + place * row + channel[None, :], mask=inside, other=0.0).to(tl.float32) - mean[None, :]
    g = tl.load(gradient + place * other + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.where(known[None, :], g - constant[None, :] - linear[None, :] * value, 0.0)
    tl.store(out + place * own + channel[None, :], g.to(out.dtype.element_ty), mask=(position < rows)[:, None] & (channel < units)[None, :])
