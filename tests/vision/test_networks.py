"""The networks have the published sizes and take any small image."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expunge.vision.networks import NETWORKS, resnet8

# trainable parameters with 10 classes and 3 channels, as published or as the common PyTorch versions count them
PARAMETERS = {
    "resnet8": 75_290,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet50_cifar": 755_802,
    "resnet56": 853_018,
    "vgg11": 9_231_114,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
    "vgg19": 20_040_522,
    "densenet100": 769_162,
    "densenet121": 6_956_298,
}
LIGHT = ["resnet8", "resnet20", "vgg11", "densenet100"]


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_every_network_has_a_published_size() -> None:
    assert PARAMETERS.keys() == NETWORKS.keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_parameter_count(name: str) -> None:
    with torch.device("meta"):
        assert count(NETWORKS[name]()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_head_is_a_linear_called_classifier(name: str) -> None:
    with torch.device("meta"):
        network = NETWORKS[name](classes=7)
    assert isinstance(network.classifier, nn.Linear)
    assert network.classifier.out_features == 7
    assert list(network.modules())[-1] is network.classifier


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (32, 3)])
@pytest.mark.parametrize("name", NETWORKS)
def test_forward_shape(name: str, size: int, channels: int) -> None:
    with torch.device("meta"):
        assert NETWORKS[name](classes=4, channels=channels)(torch.empty(2, channels, size, size)).shape == (2, 4)


@pytest.mark.parametrize("name", LIGHT)
def test_an_odd_image_is_taken(name: str) -> None:
    with torch.device("meta"):
        assert NETWORKS[name]()(torch.empty(2, 3, 15, 9)).shape == (2, 10)


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (32, 3)])
@pytest.mark.parametrize("name", LIGHT)
def test_backward_reaches_every_parameter(name: str, size: int, channels: int) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name](channels=channels)
    logits = network(torch.randn(4, channels, size, size))
    assert logits.isfinite().all()
    logits.square().sum().backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_shortcut_slices_and_pads() -> None:
    block = resnet8().stage2[0]
    x = torch.randn(2, 16, 8, 8)
    short = block.shortcut(x)
    assert torch.equal(short[:, 8:24], x[:, :, ::2, ::2])
    assert short[:, :8].abs().sum() == 0
    assert short[:, 24:].abs().sum() == 0


def test_width_scales_the_small_one() -> None:
    assert count(resnet8(channels=1, width=8)) < count(resnet8(channels=1)) / 3


def test_same_seed_same_weights() -> None:
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(resnet8())
    for first, second in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(first, second)


def test_he_initialisation_keeps_the_scale() -> None:
    torch.manual_seed(0)
    weight = resnet8().stage3[0].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
