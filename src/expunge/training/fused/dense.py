"""A dense block as one operation: what its layers add stands side by side in one memory, and its statistics are taken once.

Written with the plain operations, every layer copies all that came before it, takes its statistics again, and adds a gradient of all of it
to those of the layers behind. Here a norm's gradient is Σ over the layers of scale·g, which each layer adds where it reads anyway, less a
constant and a factor of x − mean, which are added up by channel and taken away once a channel is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expunge.training.fused import Layer, kernels
from expunge.training.fused.kernels import Norm, Slopes
from expunge.training.fused.norms import backward, finished, images, normed, rows, running

ALIGNED = 16  # channels: what convolutions and matmuls take without copying
SAVED = 11  # tensors of a layer


def block(layers: Sequence[Layer], x: Tensor) -> Tensor:
    return _Block.apply(x, layers, *(parameter for layer in layers for parameter in layer.parameters))


def aligned(channels: int) -> int:
    return -(-channels // ALIGNED) * ALIGNED


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[Layer], *parameters: Tensor) -> Tensor:
        samples, first, height, width = x.shape
        growth, inner = layers[0].conv2.out_channels, layers[0].conv1.out_channels
        total, count = first + len(layers) * growth, samples * height * width
        new = x.new_empty
        everything = new((count, aligned(total)))
        mean, variance = new((2, total), dtype=torch.float32)
        kernels.statistics(rows(x), mean[:first], variance[:first], finished(layers[0].norm1, x.device), everything)
        saved: list[Tensor] = []  # with γ and β, which may be another's than the module's at the backward pass
        ones, threes = _weights(layers, first, x)
        with torch.autocast("cuda", enabled=False):
            for number, layer in enumerate(layers):
                wide = first + number * growth
                known = Norm(mean[:wide], variance[:wide], layer.norm1.weight, layer.norm1.bias, layer.norm1.eps)
                hidden, bottleneck = new((count, aligned(wide))), new((count, inner))
                kernels.apply(everything, known, hidden, running(layer.norm1))
                torch.mm(hidden, ones[number].t(), out=bottleneck)
                opened = new((count, inner))
                own = normed(layer.norm2, bottleneck, opened)
                added = torch.conv2d(images(opened, x), threes[number], None, 1, 1)
                place = slice(wide, wide + growth)
                kernels.statistics(rows(added), mean[place], variance[place], finished(layer.norm1, x.device), everything[:, place])
                saved += [hidden, known.weight, known.bias, bottleneck, *own[:4], opened, ones[number], threes[number]]
        ctx.save_for_backward(everything, mean, variance, *saved)
        ctx.layers, ctx.shape = layers, x.shape
        return images(everything[:, :total], x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layers: Sequence[Layer] = ctx.layers
        everything, mean, variance, *saved = ctx.saved_tensors
        (count, _), first, growth = everything.shape, ctx.shape[1], layers[0].conv2.out_channels
        total = first + len(layers) * growth
        new = everything.new_empty
        into = torch.empty_like(everything)
        into[:, :total] = rows(gradient)
        constant, linear = everything.new_zeros((2, total), dtype=torch.float32)
        found: list[Tensor] = []

        def complete(start: int, end: int, wide: int) -> Tensor:
            """The gradient of these channels, all layers that read them being done."""
            place, out = slice(start, end), new((count, wide))
            kernels.finish(everything[:, place], into[:, place], mean[place], constant[place], linear[place], out)
            return out

        with torch.autocast("cuda", enabled=False):
            for number in reversed(range(len(layers))):
                layer, wide = layers[number], first + number * growth
                hidden, weight, bias, bottleneck, own_mean, own_variance, own_weight, own_bias, opened, one, three = saved[
                    SAVED * number : SAVED * (number + 1)
                ]
                sent = images(complete(wide, wide + growth, aligned(growth)), gradient)
                back, to_three, _ = torch.ops.aten.convolution_backward(
                    sent, images(opened, gradient), three, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
                )
                of_bottleneck = torch.empty_like(bottleneck)
                norm2 = Norm(own_mean, own_variance, own_weight, own_bias, layer.norm2.eps)
                slopes2 = backward(layer.norm2, norm2, bottleneck, rows(back), of_bottleneck)
                to_one = torch.mm(of_bottleneck.t(), hidden)
                of_hidden = torch.mm(of_bottleneck, one)
                norm1 = Norm(mean[:wide], variance[:wide], weight, bias, layer.norm1.eps)
                to_weight, to_bias = mean.new_empty((2, wide))
                slopes1 = Slopes(to_weight, to_bias, into, constant, linear)
                kernels.sums(everything, of_hidden, norm1, slopes1, finished(layer.norm1, back.device))
                slopes1 = slopes1.as_parameters(norm1)
                weight1 = to_one[:, :wide].to(layer.conv1.weight.dtype, memory_format=torch.contiguous_format)
                weight2 = to_three[:growth].to(layer.conv2.weight.dtype)
                of_layer = slopes1.weight, slopes1.bias, weight1.view_as(layer.conv1.weight), slopes2.weight, slopes2.bias, weight2
                found[:0] = of_layer
            of_x = images(complete(0, first, first), gradient)
        return of_x, None, *found


def _weights(layers: Sequence[Layer], first: int, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Those of all convolutions in the type of the images, padded with zeros to channels that are aligned."""
    growth, inner = layers[0].conv2.out_channels, layers[0].conv1.out_channels
    widths = [aligned(first + number * growth) for number in range(len(layers))]
    ones = list(like.new_zeros(inner * sum(widths)).split([inner * wide for wide in widths]))
    ones = [flat.view(inner, wide) for flat, wide in zip(ones, widths, strict=True)]
    threes = list(like.new_zeros((len(layers), aligned(growth), 3, 3, inner)).permute(0, 1, 4, 2, 3))
    for layer, one, three in zip(layers, ones, threes, strict=True):
        one[:, : layer.conv1.in_channels].copy_(layer.conv1.weight[:, :, 0, 0])
        three[:growth].copy_(layer.conv2.weight)
    return ones, threes
