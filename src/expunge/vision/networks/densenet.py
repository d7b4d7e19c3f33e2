"""Build DenseNet-BC for small images: a 3x3 stem, dense blocks with bottlenecks, transitions that halve channels and image.

Huang et al. 2017, arXiv:1608.06993, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expunge.training import fused
from expunge.training.fused import relu_of_norm
from expunge.vision.networks.initialisation import he_initialise


class DenseLayer(nn.Module):
    """y = [x, conv3(relu(bn(conv1(relu(bn(x))))))]; the 1x1 bottleneck is 4·growth wide."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(relu_of_norm(self.norm1, x))
        return torch.cat([x, self.conv2(relu_of_norm(self.norm2, inner))], 1)

    @property
    def parts(self) -> fused.Layer:
        return fused.Layer(self.norm1, self.conv1, self.norm2, self.conv2)


class DenseBlock(nn.Sequential):
    """Dense layers one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        if not fused.takes(x):
            return super().forward(x)
        layers = [layer.parts for layer in self if isinstance(layer, DenseLayer) and fused.is_plain(layer, DenseLayer)]
        return fused.dense_block(layers, x) if len(layers) == len(self) and fused.takes_dense(layers, x) else super().forward(x)


class Transition(nn.Module):
    """y = pool(conv1(relu(bn(x)))), half as many channels and half the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return fused.halved(self.conv, relu_of_norm(self.norm, x))


class DenseNet(nn.Module):
    """Dense blocks of `depths[b]` layers, each adding `growth` channels to the 2·growth of the stem."""

    def __init__(self, depths: Sequence[int], growth: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        width = 2 * growth
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        for block, depth in enumerate(depths):
            if block:
                self.blocks.append(Transition(width, width // 2))
                width //= 2
            self.blocks.append(DenseBlock(*[DenseLayer(width + layer * growth, growth) for layer in range(depth)]))
            width += depth * growth
        self.norm = nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = relu_of_norm(self.norm, self.blocks(self.conv(x)))
        return self.classifier(x.mean((2, 3)))


def densenet100(classes: int = 10, channels: int = 3) -> DenseNet:
    """DenseNet-BC of depth 100 and growth 12: three blocks of 16 layers."""
    return DenseNet((16, 16, 16), 12, classes, channels)


def densenet121(classes: int = 10, channels: int = 3) -> DenseNet:
    """ImageNet's DenseNet-121 layout, growth 32, behind the small images' stem."""
    return DenseNet((6, 12, 24, 16), 32, classes, channels)
