"""An inception unit as one operation: its three 1x1 convolutions of the same images are one product, every branch writes to its place
among the outputs, and the gradients of the images are added where they are written."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expunge.training.fused import Branches, Unit, pooling
from expunge.training.fused.kernels import Norm
from expunge.training.fused.norms import backward, images, normed, rows

SAVED = 7  # tensors of a unit: its weights, then those below
Taken = tuple[Tensor, ...]  # what the norm read, its mean, variance, γ and β, what it wrote


def unit(branches: Branches, x: Tensor) -> Tensor:
    parameters = (parameter for each in branches.units for parameter in each.parameters)
    return _Inception.apply(x, branches, *parameters)


def _edges(*widths: int) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(widths, initial=0))]


class _Inception(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: Branches, *parameters: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        flat, taken = rows(x), dict[Unit, Taken]()
        one, (three_in, three), (five_in, five, five_out), pooled = branches
        first = one, three_in, five_in
        outputs = one, three, five_out, pooled
        out = flat.new_empty((len(flat), sum(unit.width for unit in outputs)))
        place = dict(zip(outputs, _edges(*(unit.width for unit in outputs)), strict=True))
        weights = {unit: unit.conv.weight.to(x.dtype, memory_format=torch.channels_last) for unit in branches.units}

        def normed_unit(unit: Unit, read: Tensor) -> Tensor:
            written = out[:, place[unit]] if unit in place else read.new_empty(read.shape)
            values = normed(unit.norm, read, written, left_out=unit.conv.bias)
            taken[unit] = read, *values[:4], written
            return written

        def convolved(unit: Unit, read: Tensor) -> Tensor:
            return rows(torch.conv2d(images(read, x), weights[unit], None, 1, 1))

        with torch.autocast("cuda", enabled=False):
            merged = torch.cat([weights[unit].flatten(1) for unit in first])
            together = torch.mm(flat, merged.t())
            parts = _edges(*(unit.width for unit in first))
            inner = [normed_unit(unit, together[:, part]) for unit, part in zip(first, parts, strict=True)]
            normed_unit(three, convolved(three, inner[1]))
            normed_unit(five_out, convolved(five_out, normed_unit(five, convolved(five, inner[2]))))
            of_pool, largest = pooling.forward(x, 1)
            normed_unit(pooled, torch.mm(rows(of_pool), weights[pooled].flatten(1).t()))
        kept = [tensor for unit in branches.units for tensor in (weights[unit], *taken[unit])]
        ctx.save_for_backward(x, merged, of_pool, largest, together, *kept)
        ctx.branches = branches
        return images(out, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        branches: Branches = ctx.branches
        x, merged, of_pool, largest, together, *kept = ctx.saved_tensors
        units = branches.units
        weights = {unit: kept[SAVED * number] for number, unit in enumerate(units)}
        taken = {unit: kept[SAVED * number + 1 : SAVED * (number + 1)] for number, unit in enumerate(units)}
        one, (three_in, three), (five_in, five, five_out), pooled = branches
        first, outputs = (one, three_in, five_in), (one, three, five_out, pooled)
        sent = rows(gradient)
        place = dict(zip(outputs, _edges(*(unit.width for unit in outputs)), strict=True))
        found: dict[Unit, tuple[Tensor | None, ...]] = {}
        of_together = torch.empty_like(together)

        def through_norm(unit: Unit, slopes: Tensor, back: Tensor | None = None) -> Tensor:
            read, mean, variance, weight, bias, _ = taken[unit]
            back = torch.empty_like(read) if back is None else back
            of_norm = backward(unit.norm, Norm(mean, variance, weight, bias, unit.norm.eps), read, slopes, back)
            left_out = unit.conv.bias
            found[unit] = None if left_out is None else torch.zeros_like(left_out), of_norm.weight, of_norm.bias
            return back

        def through(unit: Unit, read: Tensor, slopes: Tensor) -> Tensor:
            """Back to what the unit's convolution read."""
            back, of_weight, _ = torch.ops.aten.convolution_backward(
                images(through_norm(unit, slopes), x), images(read, x), weights[unit], None,
                [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False],
            )  # fmt: skip
            found[unit] = of_weight, *found[unit]
            return rows(back)

        with torch.autocast("cuda", enabled=False):
            of_three = through(three, taken[three_in][-1], sent[:, place[three]])
            of_five = through(five, taken[five_in][-1], through(five_out, taken[five][-1], sent[:, place[five_out]]))
            parts = _edges(*(unit.width for unit in first))
            for unit, part, slopes in zip(first, parts, (sent[:, place[one]], of_three, of_five), strict=True):
                through_norm(unit, slopes, of_together[:, part])
            back = torch.mm(of_together, merged)
            of_merged = torch.mm(of_together.t(), rows(x))
            for unit, part in zip(first, parts, strict=True):
                found[unit] = of_merged[part].view_as(unit.conv.weight), *found[unit]
            of_pooled = through_norm(pooled, sent[:, place[pooled]])
            found[pooled] = torch.mm(of_pooled.t(), rows(of_pool)).view_as(pooled.conv.weight), *found[pooled]
            pooling.backward(images(torch.mm(of_pooled, weights[pooled].flatten(1)), x), largest, images(back, x), 1, add=True)
        gradients = (value.to(unit.conv.weight.dtype) if value is not None else None for unit in units for value in found[unit])
        return images(back, x), None, *gradients
