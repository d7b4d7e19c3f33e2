"""Build the networks of the experiments by name: each builder takes (classes, channels), each network ends in a Linear `classifier`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from expunge.errors import ModelError
from expunge.vision.networks.densenet import DenseNet, densenet100, densenet121
from expunge.vision.networks.googlenet import GoogLeNet, googlenet
from expunge.vision.networks.resnet import ResNet, resnet8, resnet20, resnet32, resnet44, resnet50_cifar, resnet56
from expunge.vision.networks.resnet_imagenet import ImageNetResNet, resnet18, resnet50
from expunge.vision.networks.vgg import VGG, vgg11, vgg13, vgg16, vgg19

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet50": resnet50,
    "resnet50_cifar": resnet50_cifar,
    "resnet56": resnet56,
    "vgg11": vgg11,
    "vgg13": vgg13,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "densenet100": densenet100,
    "densenet121": densenet121,
    "googlenet": googlenet,
}


def head(network: nn.Module) -> tuple[str, ...]:
    """The names of the classifier's parameters of one of these networks; for any other model there is `expunge.heads.find`."""
    classifier = getattr(network, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        kind = type(network).__name__
        raise ModelError(f"network: {kind} has no Linear called classifier; find the head of a model of your own with heads.find")
    return tuple(f"classifier.{name}" for name, _ in classifier.named_parameters())


__all__ = [
    "NETWORKS",
    "VGG",
    "DenseNet",
    "GoogLeNet",
    "ImageNetResNet",
    "ResNet",
    "densenet100",
    "densenet121",
    "googlenet",
    "head",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet50",
    "resnet50_cifar",
    "resnet56",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]
