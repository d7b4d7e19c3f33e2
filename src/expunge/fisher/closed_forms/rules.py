"""Compute Σ_n (∂ log p_n / ∂w)² in closed form, from an operation's input and the gradient of its output.

Each class is an autograd function that stands in for an operation during a pass. Its forward is the operation's own; its backward
returns the gradient of the input alone and passes the squared per-sample gradients of the weights to a `Use`. A weight gradient is
never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.fisher.closed_forms import convolution, cuda, native
from expunge.fisher.closed_forms.convolution import Geometry
from expunge.fisher.closed_forms.padding import Active
from expunge.fisher.closed_forms.products import squared_products
from expunge.fisher.closed_forms.scratch import wide
from expunge.fisher.closed_forms.uses import Use, as_chosen
from expunge.fisher.planning.layouts import SINGLE

Context = Any


class Linear(torch.autograd.Function):
    """y = x Wᵀ + b. On one row per sample Σ_n g_n² a_n² is a matmul of squares; on T rows (Σ_t g_t a_tᵀ)² needs the products.

    `transposed`: y = x W + b, as `addmm` and `matmul` have it.
    """

    @staticmethod
    def forward(ctx: Context, use: Use, transposed: bool, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.use, ctx.transposed = use, transposed
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        use: Use = ctx.use
        with as_chosen(gradient):
            use.keep(partial(_of_linear, ctx.transposed), inputs, gradient)
            inputs, matrix = inputs.to(gradient.dtype), weight.to(gradient.dtype).t() if ctx.transposed else weight.to(gradient.dtype)
            in_order = use.layout.dimension == 0 and (use.layout.frames == 1 or use.layout.outer) and gradient.is_contiguous()
            active = Active.of(use.rows(gradient).flatten(1, -2)) if in_order and gradient[..., 0].numel() > use.samples else None
            if use.weight is not None:
                a, g = (use.rows(tensor).flatten(1, -2) for tensor in (inputs, gradient))
                if (audit := use.audited(use.weight, "linear", ctx.transposed, a.shape[1:], g.shape[1:])) is not None:
                    audit.add_product(use.weight, *((a, g) if ctx.transposed else (g, a)))
                if use.has_several(use.weight):
                    assert use.shared is not None
                    use.shared.add_product(use.weight, *((a, g) if ctx.transposed else (g, a)))
                else:
                    total = squared_products(a, g, use.scratch, use.scratch.place(use.weight), active)
                    use.finish(use.weight, total.t() if ctx.transposed else total)
            use.add_bias(gradient, -1)
            back = None
            if ctx.needs_input_grad[2] and active is not None:
                back = active.put_back(active.taken(gradient) @ matrix, inputs.shape)
            elif ctx.needs_input_grad[2]:
                back = torch.matmul(gradient, matrix)
        return None, None, back, None, None


class Convolution(torch.autograd.Function):
    """Convolutions of one to three dimensions, transposed ones with the parts of input and output exchanged."""

    @staticmethod
    def forward(
        ctx: Context,
        use: Use,
        geometry: Geometry,
        transposed: bool,
        extra: tuple[int, ...],
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.planes = inputs.is_contiguous()
        # oneDNN crashes in channels-last on images one pixel wide with a stride and a dilation.
        last = inputs.dim() == 4 and not (inputs.shape[3] == 1 and max(geometry.stride) > 1 and max(geometry.dilation) > 1)
        inputs = inputs.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        if inputs.device.type == "cpu" and last and use.weight is not None:
            weight = use.scratch.channels_last(use.weight, weight.detach())
        ctx.use, ctx.geometry, ctx.transposed, ctx.extra = use, geometry, transposed, extra
        ctx.save_for_backward(inputs, weight)
        return torch.convolution(
            inputs, weight, bias, geometry.stride, geometry.padding, geometry.dilation, transposed, extra, geometry.groups
        )

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        use: Use = ctx.use
        with as_chosen(gradient):
            use.keep(partial(_of_convolution, weight, ctx.geometry, ctx.transposed, ctx.extra), inputs, gradient)
            if use.weight is not None:
                a, g = (use.layout.first(tensor, use.samples) for tensor in (inputs.to(gradient.dtype), gradient))
                a, g = (g, a) if ctx.transposed else (a, g)
                if (audit := use.audited(use.weight, ctx.geometry, ctx.transposed, a.shape[1:], g.shape[1:])) is not None:
                    convolution.audit(audit, use.weight, a, g, ctx.geometry, use.samples)
                place = use.scratch.place(use.weight)
                use.finish(use.weight, convolution.squares(a, g, ctx.geometry, use.scratch, place, a.shape[0] // use.samples))
            use.add_bias(gradient, 1)
            back = None
            if ctx.needs_input_grad[4]:
                geometry: Geometry = ctx.geometry
                back = torch.ops.aten.convolution_backward.default(
                    gradient, inputs.to(gradient.dtype), weight.to(gradient.dtype), None,
                    geometry.stride, geometry.padding, geometry.dilation, ctx.transposed, ctx.extra, geometry.groups,
                    [True, False, False],
                )[0]  # fmt: skip
                if ctx.planes and back.device.type == "cpu":
                    back = back.contiguous()  # as the operation before has its output: two formats in one operation are many times slower
        return None, None, None, None, back, None, None


class Affine(torch.autograd.Function):
    """y = γ ∘ x̂ + β on an input that is normalised already: dγ_n = Σ g ∘ x̂, dβ_n = Σ g over the sample's positions.

    `channel` is the first dimension γ covers; it covers as many as it has.
    """

    @staticmethod
    def forward(ctx: Context, use: Use, channel: int, normalised: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.use, ctx.channel = use, channel
        ctx.dimensions = (weight if weight is not None else bias).dim()  # type: ignore[union-attr]
        trailing = (1,) * (normalised.dim() - channel - ctx.dimensions)
        scale = None if weight is None else weight.reshape(*weight.shape, *trailing)
        shift = None if bias is None else bias.reshape(*bias.shape, *trailing)
        ctx.save_for_backward(normalised, scale)
        if scale is None:
            return normalised if shift is None else normalised + shift
        return normalised * scale if shift is None else torch.addcmul(shift, normalised, scale)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalised, scale = ctx.saved_tensors
        use: Use = ctx.use
        with as_chosen(gradient):
            use.keep(partial(_of_scale, ctx.channel, ctx.dimensions), normalised, gradient)
            if (audit := use.audited(use.weight, "norm", ctx.channel, ctx.dimensions, gradient.shape[1:])) is not None:
                assert use.weight is not None
                parts = (use.entries(audit, use.weight, part, ctx.channel, ctx.dimensions) for part in (gradient, normalised))
                audit.add_entry(use.weight, *parts)
            use.audit_bias(gradient, ctx.channel, ctx.dimensions)
            last = ctx.channel == gradient.dim() - 1 and use.layout == SINGLE and gradient.dim() > 2
            if use.weight is not None and last and (fused := _fused(normalised, gradient)):
                scaled, plain, product = fused(normalised.contiguous(), gradient.contiguous(), None, scale)
                use.add_vectors(product, plain)
                return None, None, scaled, None, None
            if use.weight is not None:
                _add_over_positions(use, use.weight, gradient * normalised, ctx)
            if use.bias is not None:
                _add_over_positions(use, use.bias, gradient, ctx)
        return None, None, gradient if scale is None else gradient * scale, None, None


class FrozenBatchNorm(torch.autograd.Function):
    """BatchNorm in eval mode, a scale and a shift: dγ_n = Σ g (x − μ)/σ, dβ_n = Σ g over the sample's positions."""

    @staticmethod
    def forward(
        ctx: Context, use: Use, inputs: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
    ) -> Tensor:
        ctx.use, ctx.epsilon = use, epsilon
        ctx.save_for_backward(inputs, mean, variance, weight)
        # torch's own kernel: cuDNN's would leave channels-last and come back.
        return torch.ops.aten.native_batch_norm.default(inputs, weight, bias, mean, variance, False, 0.0, epsilon)[0]

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, mean, variance, weight = ctx.saved_tensors
        use: Use = ctx.use
        with as_chosen(gradient):
            use.keep(partial(_of_batch_norm, mean, variance, ctx.epsilon), inputs, gradient)
            inverse, shape = (variance + ctx.epsilon).rsqrt(), (-1,) + (1,) * (inputs.dim() - 2)
            if (audit := use.audited(use.weight, "batch norm", inputs.shape[1:])) is not None:
                assert use.weight is not None
                slopes, images = (use.entries(audit, use.weight, part, 1) for part in (gradient, inputs))
                middle, width = (part[audit.entry(use.weight, part.shape)] for part in (mean, inverse))
                audit.add_entry(use.weight, slopes, (images - middle) * width)
            if use.weight is not None and inputs.dim() == 4 and use.layout == SINGLE and (fused := _fused(inputs, gradient)):
                assert weight is not None
                images, slopes = inputs.movedim(1, -1).contiguous(), gradient.movedim(1, -1).contiguous()
                use.audit_bias(gradient, 1)
                scaled, plain, centred = fused(images, slopes, mean, inverse * weight)
                use.add_vectors(centred * inverse, plain)
                return None, scaled.movedim(-1, 1), None, None, None, None, None
            # The gradient's own uses first, while it is in the cache.
            use.add_bias(gradient, 1)
            back = None
            if ctx.needs_input_grad[1]:
                scale = inverse if weight is None else inverse * weight
                back = gradient * scale.to(gradient.dtype).view(shape)
            if use.weight is not None:
                product = torch.sub(inputs, mean.to(inputs.dtype).view(shape), out=use.scratch.take_like("centred", inputs))
                use.add_rows(use.weight, wide(use.by_channel(product.mul_(gradient), 1)) * inverse)
        return None, back, None, None, None, None, None


def _fused(inputs: Tensor, gradient: Tensor) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor, Tensor]] | None:
    """A kernel of our own that takes these, which reads them once."""
    if cuda.scales(inputs):
        return cuda.scaled
    return native.scaled if native.takes(inputs) and inputs.dtype == gradient.dtype else None


def _of_linear(transposed: bool, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    a, g = inputs.to(slopes.dtype).flatten(0, -2), slopes.flatten(0, -2)
    return a.t() @ g if transposed else g.t() @ a, g.sum(0)


def _of_convolution(
    weight: Tensor, geometry: Geometry, transposed: bool, extra: tuple[int, ...], inputs: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    a, g = inputs.to(slopes.dtype).flatten(0, 1), slopes.flatten(0, 1)
    settings = geometry.stride, geometry.padding, geometry.dilation, transposed, extra, geometry.groups
    backward = torch.ops.aten.convolution_backward.default
    return backward(g, a, weight.to(g.dtype), [g.shape[1]], *settings, [False, True, True])[1:]


def _of_scale(channel: int, dimensions: int, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    positions = [index for index in range(slopes.dim()) if not channel < index <= channel + dimensions]  # behind samples and frames
    return (inputs * slopes).sum(positions), slopes.sum(positions)


def _of_batch_norm(mean: Tensor, variance: Tensor, epsilon: float, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    positions, shape = [index for index in range(slopes.dim()) if index != 2], (-1,) + (1,) * (inputs.dim() - 3)
    centred = (inputs - mean.view(shape)) * slopes
    return centred.sum(positions) * (variance + epsilon).rsqrt(), slopes.sum(positions)


def _add_over_positions(use: Use, name: str, tensor: Tensor, ctx: Context) -> None:
    """Σ_n (Σ over the sample's positions)², the positions being every dimension the parameter does not cover."""
    covered = range(ctx.channel, ctx.channel + ctx.dimensions)
    rows = wide(use.rows(tensor.movedim(tuple(covered), tuple(range(-ctx.dimensions, 0)))))
    sums = rows.sum(tuple(range(1, rows.dim() - ctx.dimensions)))
    if use.has_several(name):
        use.add_rows(name, sums)
    else:
        use.add(name, sums.square().sum(0))
