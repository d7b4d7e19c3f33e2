"""The networks of the experiments, by name; each builder takes (classes, channels), each network ends in a Linear `classifier`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from expunge.vision.networks.densenet import DenseNet, densenet100, densenet121
from expunge.vision.networks.resnet import ResNet, resnet8, resnet20, resnet32, resnet44, resnet50_cifar, resnet56
from expunge.vision.networks.vgg import VGG, vgg11, vgg13, vgg16, vgg19

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet50_cifar": resnet50_cifar,
    "resnet56": resnet56,
    "vgg11": vgg11,
    "vgg13": vgg13,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "densenet100": densenet100,
    "densenet121": densenet121,
}

__all__ = [
    "NETWORKS",
    "VGG",
    "DenseNet",
    "ResNet",
    "densenet100",
    "densenet121",
    "resnet8",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet50_cifar",
    "resnet56",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]
