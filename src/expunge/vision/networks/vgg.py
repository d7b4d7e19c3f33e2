"""Build VGG with BatchNorm for small images: five stages of 3x3 convolutions, and one Linear in place of ImageNet's three.

Simonyan and Zisserman 2015, arXiv:1409.1556, table 1, columns A, B, D and E.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from expunge.training.fused import relu_of_normed
from expunge.vision.networks.initialisation import he_initialise

WIDTHS = (64, 128, 256, 512, 512)


class ConvolutionUnit(nn.Module):
    """y = relu(bn(conv(x)))"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return relu_of_normed(self.conv, self.norm, x)


class VGG(nn.Module):
    """`depths[s]` convolutions of `WIDTHS[s]` channels in stage s; a 2x2 max pool after each stage."""

    def __init__(self, depths: Sequence[int], classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for depth, width in zip(depths, WIDTHS, strict=True):
            inputs = [channels, *[width] * (depth - 1)]
            self.stages.append(nn.Sequential(*[ConvolutionUnit(size, width) for size in inputs]))
            channels = width
        self.classifier = nn.Linear(channels, classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        for convolutions in self.stages:
            x = convolutions(x)
            if min(x.shape[2:]) > 1:  # an 8x8 image is one position wide after three pools
                x = functional.max_pool2d(x, 2)
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def vgg11(classes: int = 10, channels: int = 3) -> VGG:
    return VGG((1, 1, 2, 2, 2), classes, channels)


def vgg13(classes: int = 10, channels: int = 3) -> VGG:
    return VGG((2, 2, 2, 2, 2), classes, channels)


def vgg16(classes: int = 10, channels: int = 3) -> VGG:
    return VGG((2, 2, 3, 3, 3), classes, channels)


def vgg19(classes: int = 10, channels: int = 3) -> VGG:
    return VGG((2, 2, 4, 4, 4), classes, channels)
