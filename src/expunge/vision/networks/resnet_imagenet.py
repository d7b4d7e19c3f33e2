"""Build ImageNet's ResNets for small images: four stages behind a 3x3 stem without pooling, a Linear head.

He et al. 2016, arXiv:1512.03385, table 1, with 1x1 convolutions where a shortcut changes shape (option B).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from expunge.training.fused import relu_of_norm
from expunge.vision.networks.initialisation import he_initialise


class Basic(nn.Module):
    """y = relu(x̃ + bn(conv3(relu(bn(conv3(x)))))), as many channels out as inside; x̃ is x or bn(conv1(x))."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu_of_norm(self.norm1, self.conv1(x))
        return relu_of_norm(self.norm2, self.conv2(inner), added=self.shortcut(x))


class Bottleneck(nn.Module):
    """y = relu(x̃ + bn(conv1(relu(bn(conv3(relu(bn(conv1(x)))))))))), 4·width channels out; x̃ is x or bn(conv1(x)).

    The stride is the 3x3 convolution's, as in the common PyTorch versions (the paper has it in the first 1x1).
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu_of_norm(self.norm1, self.conv1(x))
        inner = relu_of_norm(self.norm2, self.conv2(inner))
        return relu_of_norm(self.norm3, self.conv3(inner), added=self.shortcut(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ImageNetResNet(nn.Module):
    """Stages of `blocks[s]` blocks that are `width`·2^s wide inside; all but the first halve the image."""

    def __init__(
        self, block: type[Basic | Bottleneck], blocks: Sequence[int], classes: int = 10, channels: int = 3, width: int = 64
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential()
        inputs = width
        for number, count in enumerate(blocks):
            inner, stage = width * 2**number, nn.Sequential()
            for place in range(count):
                stage.append(block(inputs, inner, stride=2 if number and not place else 1))
                inputs = block.expansion * inner
            self.stages.append(stage)
        self.classifier = nn.Linear(inputs, classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(relu_of_norm(self.norm, self.conv(x)))
        return self.classifier(x.mean((2, 3)))


def resnet18(classes: int = 10, channels: int = 3, width: int = 64) -> ImageNetResNet:
    """The network of most other tables of unlearning on CIFAR-10."""
    return ImageNetResNet(Basic, (2, 2, 2, 2), classes, channels, width)


def resnet50(classes: int = 10, channels: int = 3, width: int = 64) -> ImageNetResNet:
    """The bottleneck network the paper's text names; `resnet50_cifar` is what its release calls ResNet50."""
    return ImageNetResNet(Bottleneck, (3, 4, 6, 3), classes, channels, width)
