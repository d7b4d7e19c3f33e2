"""The networks have the published sizes and take any small image."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import expunge
from expunge import fisher
from expunge.errors import ModelError
from expunge.vision.networks import NETWORKS, head, resnet8, resnet18, resnet50

# trainable parameters with 10 classes and 3 channels, as published or as the common PyTorch versions count them
PARAMETERS = {
    "resnet8": 75_290,
    "resnet18": 11_173_962,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet50": 23_520_842,
    "resnet50_cifar": 755_802,
    "resnet56": 853_018,
    "vgg11": 9_231_114,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
    "vgg19": 20_040_522,
    "densenet100": 769_162,
    "densenet121": 6_956_298,
    "googlenet": 6_166_250,
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


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (32, 3), (64, 5)])
@pytest.mark.parametrize("name", NETWORKS)
def test_forward_shape(name: str, size: int, channels: int) -> None:
    with torch.device("meta"):
        assert NETWORKS[name](classes=4, channels=channels)(torch.empty(2, channels, size, size)).shape == (2, 4)


@pytest.mark.parametrize("name", NETWORKS)
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


@pytest.mark.parametrize("name", NETWORKS)
def test_forward_backward_and_fisher_on_the_smallest_image(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name](classes=3, channels=2)
    batch = (torch.randn(2, 2, 8, 8), torch.tensor([0, 2]))
    torch.nn.functional.cross_entropy(network(batch[0]), batch[1]).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())
    network.zero_grad(set_to_none=True)
    sums = fisher.diagonal(network, [batch])
    assert sums.count == 2 and sums.sums.keys() == dict(network.named_parameters()).keys()
    # closed forms round in float32: a value far below the layer's largest may come out a hair below 0
    assert all(values.isfinite().all() and values.min() >= -1e-7 * values.max() for values in sums.sums.values())
    assert float(sums.sums["classifier.bias"].sum()) > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_head_names_what_the_graph_shows(name: str) -> None:
    with torch.device("meta"):
        assert head(NETWORKS[name]()) == ("classifier.weight", "classifier.bias")
    if name in LIGHT:
        network = NETWORKS[name](channels=1)
        assert head(network) == expunge.heads.find(network, (torch.randn(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)))


def test_the_head_of_another_model_is_found_otherwise() -> None:
    with pytest.raises(ModelError, match="Sequential has no Linear called classifier.*heads.find"):
        head(nn.Sequential(nn.Linear(2, 2)))


def test_nothing_works_in_place() -> None:
    """Backward hooks on every module, which forbid it, and a forward that leaves its input alone."""
    for name in ("resnet18", "resnet50", "googlenet", *LIGHT):
        network = NETWORKS[name](channels=1)
        for module in network.modules():
            module.register_full_backward_hook(lambda module, inputs, outputs: None)
        images = torch.randn(2, 1, 8, 8)
        before = images.clone()
        network(images.requires_grad_()).sum().backward()
        assert torch.equal(images, before)


def test_googlenet_concatenates_four_paths() -> None:
    network = NETWORKS["googlenet"]()
    widths = [unit(torch.zeros(1, inputs, 4, 4)).shape[1] for unit, inputs in zip(network.stages[0], (192, 256), strict=True)]
    assert widths == [256, 480] and network.classifier.in_features == 1024


@pytest.mark.parametrize(("build", "expansion"), [(resnet18, 1), (resnet50, 4)])
def test_imagenets_stages_halve_the_image_three_times(build, expansion) -> None:
    network = build(width=4)
    x = torch.zeros(1, 4, 32, 32)
    shapes = [tuple((x := stage(x)).shape[1:]) for stage in network.stages]
    assert shapes == [(4 * expansion, 32, 32), (8 * expansion, 16, 16), (16 * expansion, 8, 8), (32 * expansion, 4, 4)]


class Output:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.loss = logits, None


class PixelModel(nn.Module):
    """Called and answering as the image classifiers of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Conv2d(1, 6, 3)
        self.classifier = nn.Linear(6, 3)

    def forward(self, pixel_values: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> Output:
        assert pixel_values is not None and labels is None
        return Output(self.classifier(self.embeddings(pixel_values).relu().mean((2, 3))))


def test_a_model_of_hugging_face_needs_no_wrapper() -> None:
    torch.manual_seed(0)
    model = PixelModel()
    rows = [{"pixel_values": torch.randn(1, 8, 8), "labels": index % 3} for index in range(24)]
    forget, remain = ([row for row in rows if (row["labels"] == 0) is chosen] for chosen in (True, False))
    tuning = expunge.Tuning(expunge.Constant(0.01, epochs=1), batch_size=4)
    outcome = expunge.unlearn(model, forget, remain, expunge.FisherMask(ratio=0.1, tuning=tuning))
    assert len(outcome.epochs) == 2 and outcome.edit is not None
    assert not torch.equal(outcome.model.embeddings.weight, model.embeddings.weight)


def test_a_model_of_ones_own_needs_the_objective_alone() -> None:
    torch.manual_seed(0)
    model = resnet8(classes=3, channels=1, width=4)
    objective = expunge.Objective(outputs=lambda model, batch: model(batch["image"][0]), targets=lambda batch: batch["kind"])
    batches = [{"image": (torch.randn(8, 1, 8, 8),), "kind": torch.arange(8) % 3} for _ in range(2)]
    outcome = expunge.unlearn(model, batches[:1], batches[1:], expunge.FisherMask(ratio=0.1, tuning=None), objective=objective)
    assert outcome.edit is not None


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
