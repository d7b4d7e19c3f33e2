"""Square the gradients of tables and of bare parameters: embeddings, class tokens, positions, layer scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.fisher.closed_forms.drawn import Part
from expunge.fisher.closed_forms.scratch import wide
from expunge.fisher.closed_forms.shared import looked_up
from expunge.fisher.closed_forms.uses import Use, as_chosen
from expunge.fisher.planning.layouts import Layout

Context = Any


class Embedding(torch.autograd.Function):
    """y_t = W[i_t]: a row's gradient is the sum over the sample's positions that hold its index."""

    @staticmethod
    def forward(ctx: Context, use: Use, padding: int, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.use, ctx.padding, ctx.count = use, padding, weight.shape[0]
        ctx.save_for_backward(indices)
        embedded = F.embedding(indices, weight)
        return embedded if use.layout.frames else expanded(embedded, use.samples)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        use: Use = ctx.use
        with as_chosen(gradient):
            if use.layout.frames:
                rows = use.rows(indices).flatten(1)
                g = use.rows(gradient).flatten(1, -2)
            else:
                rows = indices.reshape(1, -1).expand(use.samples, -1)
                g = gradient.flatten(1, -2)
            assert use.weight is not None
            if ctx.padding >= 0:
                g = g.masked_fill((rows == ctx.padding)[..., None], 0)
            if use.takes(use.weight):
                assert use.drawn is not None
                kept = (part.index_select(0, use.drawn.rows)[:, None] for part in (rows, g))
                use.drawn.parts.append(Part(use.weight, None, partial(_of_table, ctx.count), *kept))
            if (audit := use.audited(use.weight, "table", rows.shape[1:], ctx.count, g.shape[2:])) is not None:
                audit.add_lookup(use.weight, rows, g)
            if use.has_several(use.weight):
                assert use.shared is not None
                use.shared.add_lookup(use.weight, rows, g, ctx.count)
            else:
                use.add(use.weight, looked_up(rows, g, ctx.count).squares())
        return None, None, None, None


class Lift(torch.autograd.Function):
    """A bare parameter (class token, positions, layer scale) once per sample, so that its gradient comes back once per sample."""

    @staticmethod
    def forward(ctx: Context, use: Use, shape: tuple[int, ...], parameter: Tensor) -> Tensor:
        ctx.use, ctx.shape = use, parameter.shape
        return parameter.reshape(shape).expand(use.samples, *shape[1:]).clone()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        assert use.weight is not None
        use.keep(partial(_of_lifted, ctx.shape), gradient, gradient)
        if (audit := use.audited(use.weight, "lifted", ctx.shape)) is not None:
            slopes = gradient.reshape(use.samples, *ctx.shape).movedim(0, -1)
            audit.add_entry(use.weight, slopes[audit.entry(use.weight, ctx.shape)][:, None])
        use.add(use.weight, wide(gradient).square().sum(0).reshape(ctx.shape))
        return None, None, None


class LiftDerived(torch.autograd.Function):
    """A tensor made of parameters alone, once per row of the data it meets; its gradients, (samples, ...), are passed on to `collect`.

    `anchor` is one of these parameters: backward passes come here only if they lead to one.
    """

    @staticmethod
    def forward(
        ctx: Context, collect: Any, layout: Layout, samples: int, rows: int, shape: tuple[int, ...], made: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.collect, ctx.layout, ctx.samples, ctx.shape = collect, layout, samples, made.shape
        return made.reshape(shape).expand(rows, *shape[1:]).clone()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.collect(wide(ctx.layout.rows(gradient, ctx.samples)).sum(1).reshape(ctx.samples, *ctx.shape))
        return None, None, None, None, None, None, None


def expanded(tensor: Tensor, samples: int) -> Tensor:
    """A tensor without a sample dimension, once per sample: (1, ...) becomes (N, ...), anything else gets N in front."""
    return (tensor if tensor.shape[0] == 1 else tensor[None]).expand(samples, *tensor.shape[tensor.shape[0] == 1 :]).clone()


def _of_table(count: int, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, None]:
    return slopes.new_zeros(count, slopes.shape[-1]).index_add_(0, inputs.flatten(), slopes.flatten(0, -2)), None


def _of_lifted(shape: torch.Size, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, None]:
    return slopes.sum((0, 1)).reshape(shape), None
