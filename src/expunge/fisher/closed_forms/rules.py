"""Compute Σ_n (∂ log p_n / ∂w)² in closed form, from an operation's input and the gradient of its output.

Each class is an autograd function that stands in for an operation during a pass. Its forward is the operation's own; its backward
returns the gradient of the input alone and passes the squared per-sample gradients of the weights to a `Use`. A weight gradient is
never formed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.fisher.closed_forms import convolution, cuda, tf32
from expunge.fisher.closed_forms.convolution import Geometry
from expunge.fisher.closed_forms.drawn import Drawn, Gradients, Part
from expunge.fisher.closed_forms.scratch import Scratch, add_squared_products, summed_products, wide
from expunge.fisher.planning.layouts import Layout

Context = Any


@dataclass(frozen=True)
class Use:
    """One use of parameters in a forward pass: their names, where the samples are, and where the squares go."""

    weight: str | None  # the parameter's name; None where it is not wanted
    bias: str | None
    layout: Layout
    samples: int
    scratch: Scratch
    squares: dict[str, Tensor]  # totals of the pass, in the shapes of the parameters
    vectors: list[tuple[str, Tensor]]  # gradients of vectors, (samples, channels), that `settle` squares
    drawn: Drawn | None = None  # samples to keep for a check

    def add(self, name: str, squares: Tensor) -> None:
        self.squares[name] = self.squares[name].add_(squares) if name in self.squares else squares

    def rows(self, tensor: Tensor) -> Tensor:
        return self.layout.rows(tensor, self.samples)

    def keep(self, gradients: Gradients, inputs: Tensor, slopes: Tensor) -> None:
        """Keep the drawn samples' rows of an operation whose weight has the gradients `gradients(inputs, slopes)`."""
        if self.drawn is not None and self.drawn.takes(self.weight, self.bias):
            a, g = (self.layout.drawn(tensor, self.samples, self.drawn.rows) for tensor in (inputs, slopes))
            if inputs.device.type == "cpu" and len(self.drawn.rows) == 1:  # small pieces of fresh memory would slow down the whole pass
                a, g = self.scratch.copied(self.drawn.slot, a), self.scratch.copied(self.drawn.slot, g)
            self.drawn.parts.append(Part(self.weight, self.bias, gradients, a, g))

    def add_bias(self, gradient: Tensor, channel: int) -> None:
        """(Σ over all but sample and channel)², summed over samples."""
        if self.bias is not None:
            self.vectors.append((self.bias, wide(self.by_channel(gradient, channel))))

    def add_vectors(self, weight: Tensor, bias: Tensor) -> None:
        """Gradients of a weight and a bias that are vectors, each (samples, channels)."""
        self.vectors.extend((name, part) for name, part in ((self.weight, weight), (self.bias, bias)) if name is not None)

    def by_channel(self, tensor: Tensor, channel: int) -> Tensor:
        """Sums over all but sample and channel: (samples, channels)."""
        if self.layout == Layout():
            positions = [index for index in range(1, tensor.dim()) if index != channel % tensor.dim()]
            return tensor.sum(positions) if positions else tensor
        rows = self.rows(tensor.movedim(channel, -1) if channel not in (-1, tensor.dim() - 1) else tensor)
        return rows.sum(tuple(range(1, rows.dim() - 1))) if rows.dim() > 2 else rows


def settle(squares: dict[str, Tensor], vectors: list[tuple[str, Tensor]]) -> None:
    """Square the gradients of all vectors at once: a network has many and they are short."""
    if not vectors:
        return
    names, rows = zip(*vectors, strict=True)
    totals = torch.cat(rows, 1).square_().sum(0).split([part.shape[1] for part in rows])
    for name, total in zip(names, totals, strict=True):
        squares[name] = squares[name].add_(total) if name in squares else total
    vectors.clear()


def squared_products(a: Tensor, g: Tensor, scratch: Scratch, name: str) -> Tensor:
    """The running total of Σ_n (g_nᵀ a_n)² for (N, T, I) and (N, T, O) as (O, I)."""
    if a.shape[1] == 1:
        total = scratch.total(name, (g.shape[2], a.shape[2]), a)
        return total.add_(summed_products(wide(g[:, 0]).square(), wide(a[:, 0]).square()))
    if cuda.takes(a, tf32.in_matmuls(), 1, a.shape[1], a.shape[2], g.shape[2]):  # a row of positions under a kernel of one tap
        total = scratch.total(name, (a.shape[2], g.shape[2]), a)
        return total.add_(cuda.squares(a.contiguous()[:, None], g.contiguous()[:, None], (1, 1), (1, 1), (0, 0), (1, 1))[0]).t()
    turned = a.device.type == "cpu" and a.shape[2] > g.shape[2]  # MKL is faster with the longer side first
    first, second = (a, g) if turned else (g, a)
    total = scratch.total(name, (first.shape[2], second.shape[2]), a)
    add_squared_products(total[None], first.transpose(1, 2)[:, None], second[:, None], scratch)
    return total.t() if turned else total


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
        with _exact(gradient):
            use.keep(partial(_of_linear, ctx.transposed), inputs, gradient)
            if use.weight is not None:
                a, g = (use.rows(tensor).flatten(1, -2) for tensor in (inputs.to(gradient.dtype), gradient))
                total = squared_products(a, g, use.scratch, use.weight)
                use.squares[use.weight] = total.t() if ctx.transposed else total
            use.add_bias(gradient, -1)
            back = None
            if ctx.needs_input_grad[2]:
                back = torch.matmul(gradient, weight.t().to(gradient.dtype) if ctx.transposed else weight.to(gradient.dtype))
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
        with _exact(gradient):
            use.keep(partial(_of_convolution, weight, ctx.geometry, ctx.transposed, ctx.extra), inputs, gradient)
            if use.weight is not None:
                a, g = (use.layout.first(tensor, use.samples) for tensor in (inputs.to(gradient.dtype), gradient))
                a, g = (g, a) if ctx.transposed else (a, g)
                use.squares[use.weight] = convolution.squares(a, g, ctx.geometry, use.scratch, use.weight, len(a) // use.samples)
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
        with _exact(gradient):
            use.keep(partial(_of_scale, ctx.channel, ctx.dimensions), normalised, gradient)
            last = ctx.channel == gradient.dim() - 1 and use.layout == Layout() and gradient.dim() > 2
            if use.weight is not None and last and cuda.scales(normalised):
                scaled, plain, product = cuda.scaled(normalised.contiguous(), gradient.contiguous(), None, scale)
                use.add_vectors(product, plain)
                return None, None, scaled, None, None
            if use.weight is not None:
                use.add(use.weight, _over_positions(use, gradient * normalised, ctx))
            if use.bias is not None:
                use.add(use.bias, _over_positions(use, gradient, ctx))
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
        with _exact(gradient):
            use.keep(partial(_of_batch_norm, mean, variance, ctx.epsilon), inputs, gradient)
            inverse, shape = (variance + ctx.epsilon).rsqrt(), (-1,) + (1,) * (inputs.dim() - 2)
            if use.weight is not None and inputs.dim() == 4 and use.layout == Layout() and cuda.scales(inputs):
                assert weight is not None
                images, slopes = inputs.movedim(1, -1).contiguous(), gradient.movedim(1, -1).contiguous()
                scaled, plain, centred = cuda.scaled(images, slopes, mean, inverse * weight)
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
                use.vectors.append((use.weight, wide(use.by_channel(product.mul_(gradient), 1)) * inverse))
        return None, back, None, None, None, None, None


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
        with _exact(gradient):
            if use.layout.frames:
                rows = use.rows(indices).flatten(1)
                g = use.rows(gradient).flatten(1, -2)
            else:
                rows = indices.reshape(1, -1).expand(use.samples, -1)
                g = gradient.flatten(1, -2)
            if use.drawn is not None and use.drawn.takes(use.weight):
                kept = (part.index_select(0, use.drawn.rows)[:, None] for part in (rows, g))
                use.drawn.parts.append(Part(use.weight, None, partial(_of_table, ctx.count, ctx.padding), *kept))
            g, owner = wide(g), torch.arange(use.samples, device=rows.device)[:, None] * ctx.count
            pairs, place = torch.unique(owner + rows, return_inverse=True)  # (sample, index) pairs that occur
            sums = g.new_zeros(len(pairs), g.shape[-1]).index_add_(0, place.flatten(), g.flatten(0, 1))
            total = g.new_zeros(ctx.count, g.shape[-1]).index_add_(0, pairs % ctx.count, sums.square_())
            if ctx.padding >= 0:
                total[ctx.padding] = 0
            assert use.weight is not None
            use.add(use.weight, total)
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
        use.add(use.weight, wide(gradient).square().sum(0).reshape(ctx.shape))
        return None, None, None


def expanded(tensor: Tensor, samples: int) -> Tensor:
    """A tensor without a sample dimension, once per sample: (1, ...) becomes (N, ...), anything else gets N in front."""
    return (tensor if tensor.shape[0] == 1 else tensor[None]).expand(samples, *tensor.shape[tensor.shape[0] == 1 :]).clone()


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


def _of_table(count: int, padding: int, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, None]:
    total = slopes.new_zeros(count, slopes.shape[-1]).index_add_(0, inputs.flatten(), slopes.flatten(0, -2))
    if padding >= 0:
        total[padding] = 0
    return total, None


def _of_lifted(shape: torch.Size, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, None]:
    return slopes.sum((0, 1)).reshape(shape), None


def _over_positions(use: Use, tensor: Tensor, ctx: Context) -> Tensor:
    """Σ_n (Σ over the sample's positions)², the positions being every dimension the parameter does not cover."""
    covered = range(ctx.channel, ctx.channel + ctx.dimensions)
    rows = wide(use.rows(tensor.movedim(tuple(covered), tuple(range(-ctx.dimensions, 0)))))
    return rows.sum(tuple(range(1, rows.dim() - ctx.dimensions))).square().sum(0)


def _exact(gradient: Tensor) -> AbstractContextManager[Any]:
    """Types are as the forward pass chose them: no second cast in backward."""
    place = gradient.device.type
    return torch.autocast(place, enabled=False) if torch.is_autocast_enabled(place) else nullcontext()
