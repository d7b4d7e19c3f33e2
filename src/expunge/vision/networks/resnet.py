"""Build CIFAR ResNets of depth 6n + 2: a 3x3 stem, three stages of n blocks, a Linear head.

He et al. 2016, arXiv:1512.03385, section 4.2, with their parameter-free shortcuts (option A).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from expunge.training.fused import relu_of_norm
from expunge.vision.networks.initialisation import he_initialise


class BasicBlock(nn.Module):
    """y = relu(x̃ + bn(conv(relu(bn(conv(x)))))), where x̃ is x sliced by the stride and padded with zero channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.missing = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        # nothing here works in place: backward hooks, which the engine's peers rely on, forbid it
        inner = relu_of_norm(self.norm1, self.conv1(x))
        return relu_of_norm(self.norm2, self.conv2(inner), added=self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.missing:
            before = self.missing // 2
            x = functional.pad(x, (0, 0, 0, 0, before, self.missing - before))
        return x


class ResNet(nn.Module):
    """Stages of `width`, 2·`width` and 4·`width` channels, each of `blocks` blocks; the second and third halve the image."""

    def __init__(self, blocks: int, classes: int = 10, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stage1 = stage(width, width, blocks, stride=1)
        self.stage2 = stage(width, 2 * width, blocks, stride=2)
        self.stage3 = stage(2 * width, 4 * width, blocks, stride=2)
        self.classifier = nn.Linear(4 * width, classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = relu_of_norm(self.norm, self.conv(x))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.classifier(x.mean((2, 3)))


def stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    later = [BasicBlock(outputs, outputs, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(inputs, outputs, stride), *later)


def resnet8(classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    return ResNet(1, classes, channels, width)


def resnet20(classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    return ResNet(3, classes, channels, width)


def resnet32(classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    return ResNet(5, classes, channels, width)


def resnet44(classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    return ResNet(7, classes, channels, width)


def resnet50_cifar(classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    """Depth 6·8 + 2 = 50 of basic blocks, which the paper's release calls ResNet50; not the bottleneck ResNet-50 of ImageNet."""
    return ResNet(8, classes, channels, width)


def resnet56(classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    return ResNet(9, classes, channels, width)
