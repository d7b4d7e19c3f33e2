"""Build GoogLeNet with BatchNorm for small images: a 3x3 stem of 192 channels, nine inception units, one Linear.

Szegedy et al. 2015, arXiv:1409.4842, table 1 from inception (3a) on. Departures, as is common for small images: no pooling in the stem,
BatchNorm after every convolution, two 3x3 convolutions in place of the 5x5, no auxiliary classifiers, no dropout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from expunge.training import fused
from expunge.training.fused import max_pool, relu_of_normed
from expunge.vision.networks.initialisation import he_initialise


class Widths(NamedTuple):
    """Channels of one inception unit: the 1x1 path, the 3x3 path, the double 3x3 path, the pooled path."""

    one: int
    three_inner: int
    three: int
    five_inner: int
    five: int
    pooled: int

    @property
    def outputs(self) -> int:
        return self.one + self.three + self.five + self.pooled


STAGES = (
    (Widths(64, 96, 128, 16, 32, 32), Widths(128, 128, 192, 32, 96, 64)),
    (
        Widths(192, 96, 208, 16, 48, 64),
        Widths(160, 112, 224, 24, 64, 64),
        Widths(128, 128, 256, 24, 64, 64),
        Widths(112, 144, 288, 32, 64, 64),
        Widths(256, 160, 320, 32, 128, 128),
    ),
    (Widths(256, 160, 320, 32, 128, 128), Widths(384, 192, 384, 48, 128, 128)),
)
STEM = 192


class Unit(nn.Module):
    """y = relu(bn(conv(x))), the image's size kept."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return relu_of_normed(self.conv, self.norm, x)

    @property
    def parts(self) -> fused.Unit:
        return fused.Unit(self.conv, self.norm)


class Inception(nn.Module):
    """y = [1x1(x), 3x3(1x1(x)), 3x3(3x3(1x1(x))), 1x1(maxpool(x))]"""

    def __init__(self, inputs: int, widths: Widths) -> None:
        super().__init__()
        self.one = Unit(inputs, widths.one, 1)
        self.three = nn.Sequential(Unit(inputs, widths.three_inner, 1), Unit(widths.three_inner, widths.three, 3))
        self.five = nn.Sequential(
            Unit(inputs, widths.five_inner, 1), Unit(widths.five_inner, widths.five, 3), Unit(widths.five, widths.five, 3)
        )
        self.pooled = Unit(inputs, widths.pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = self.branches if fused.takes(x) else None
        if branches is not None and fused.takes_inception(branches, x):
            return fused.inception_unit(branches, x)
        pooled = self.pooled(max_pool(x, stride=1))
        return torch.cat([self.one(x), self.three(x), self.five(x), pooled], 1)

    @property
    def branches(self) -> fused.Branches | None:
        """None where a path is not as it was built."""
        if not all(fused.is_plain(path, nn.Sequential) for path in (self.three, self.five)):
            return None
        paths = [self.one], [*self.three], [*self.five], [self.pooled]
        plain = [[unit.parts for unit in path if isinstance(unit, Unit) and fused.is_plain(unit, Unit)] for path in paths]
        if not [*map(len, paths)] == [*map(len, plain)] == [1, 2, 3, 1]:
            return None
        one, three, five, pooled = plain
        return fused.Branches(one[0], (three[0], three[1]), (five[0], five[1], five[2]), pooled[0])


class GoogLeNet(nn.Module):
    """Three stages of inception units; a 3x3 max pool halves the image between them."""

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stem = Unit(channels, STEM, 3)
        self.stages = nn.ModuleList()
        width = STEM
        for stage in STAGES:
            units = nn.Sequential()
            for widths in stage:
                units.append(Inception(width, widths))
                width = widths.outputs
            self.stages.append(units)
        self.classifier = nn.Linear(width, classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, stage in enumerate(self.stages):
            x = stage(max_pool(x, stride=2) if number else x)
        return self.classifier(x.mean((2, 3)))


def googlenet(classes: int = 10, channels: int = 3) -> GoogLeNet:
    return GoogLeNet(classes, channels)
