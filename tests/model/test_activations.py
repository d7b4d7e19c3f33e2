"""Channels are found from the flow of data, and their activations equal a loop over samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from expunge.data.objective import Objective
from expunge.editing import scores
from expunge.errors import InputError, MismatchError, ModelError
from expunge.model import activations, channels
from expunge.model.activations import Activations
from expunge.model.channels import Layer
from expunge.vision.networks import DenseNet, resnet8
from tests import reference
from tests.methods.properties import assert_untouched


def plain() -> nn.Sequential:
    """No BatchNorm."""
    layers = [nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))


NETWORKS = {
    "residual": lambda: resnet8(4, width=4),
    "dense": lambda: DenseNet((2, 2), growth=3, classes=4),
    "plain": plain,
}
# The BatchNorm that is given each layer's output, written down by hand; the head is left out.
NORMS = {
    "residual": {"conv": "norm"} | {f"stage{s}.0.conv{c}": f"stage{s}.0.norm{c}" for s in (1, 2, 3) for c in (1, 2)},
    "dense": {"conv": "blocks.0.0.norm1", "blocks.1.conv": None}
    | {f"blocks.{block}.{layer}.conv1": f"blocks.{block}.{layer}.norm2" for block in (0, 2) for layer in (0, 1)}
    | {f"blocks.{block}.{layer}.conv2": None for block in (0, 2) for layer in (0, 1)},
    "plain": {"0": None, "2": None, "5": None},
}
HEADS = {"residual": ("classifier.weight",), "dense": ("classifier.weight",), "plain": ("7.weight", "7.bias")}
every_network = pytest.mark.parametrize("name", NETWORKS)


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With statistics and norms that are not the identity."""
    torch.manual_seed(0)
    model = NETWORKS[name]().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)
    return model


def batch(size: int = 12, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 8, 8, generator=generator).to(dtype), torch.arange(size) % 4


def layers_of(model: nn.Module, inputs: torch.Tensor, head: tuple[str, ...] = ()) -> dict[str, str | None]:
    return {layer.name: layer.norm for layer in channels.find(model, (inputs, torch.zeros(len(inputs))), head=head)}


@every_network
def test_every_layer_is_found_with_the_norm_it_feeds(name):
    model = network(name)
    found = channels.find(model, batch(), head=HEADS[name])
    assert {layer.name: layer.norm for layer in found} == NORMS[name]
    assert [layer.channels for layer in found] == [len(model.get_submodule(layer.name).weight) for layer in found]
    assert [layer.name for layer in found] == [module for module, _ in model.named_modules() if module in NORMS[name]]
    whole = layers_of(model, batch()[0])
    assert len(whole) == len(found) + 1


class Crossed(nn.Module):
    """Declared in an order that says nothing: `first` goes to `late`, `second` to `early`, sizes alike; `unused` is never called."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.early, self.second, self.unused = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.late = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        inner = self.first(x)
        if self.way == "in place":
            inner.relu_()
        elif self.way == "sum":
            inner = inner + x
        elif self.way == "part":
            inner = torch.cat([inner[:, :2], inner[:, 2:]], 1)
        elif self.way == "another type":
            inner = inner.float().double()
        elif self.way == "shared":
            return self.late(self.second(self.late(inner)))
        elif self.way == "twice":
            self.early(inner)
        elif self.way == "dropout":
            inner = functional.dropout(inner, 0.5, self.training)
        elif self.way == "keyword":
            return self.early(self.second(self.late(input=inner)))
        return self.early(self.second(self.late(inner).relu()))


@pytest.mark.parametrize(
    ("way", "norms"),
    {
        "": ("late", "early"),
        "dropout": ("late", "early"),
        "in place": (None, "early"),
        "sum": (None, "early"),
        "part": (None, "early"),
        "another type": (None, "early"),
        "keyword": ("late", "early"),
        "shared": (None, None),
        "twice": (None, None),
    }.items(),
)
def test_a_norm_belongs_to_a_layer_that_alone_feeds_it(way, norms):
    model = Crossed(way).double()
    assert layers_of(model, torch.randn(3, 4).double()) == {"first": norms[0], "second": norms[1]}


class Moved(nn.Module):
    """Linear units as the channels of BatchNorm, after a change of layout."""

    def __init__(self, change) -> None:
        super().__init__()
        self.linear, self.norm, self.change = nn.Linear(4, 6), nn.BatchNorm1d(6), change

    def forward(self, x):
        return self.norm(self.change(self.linear(x)))


@pytest.mark.parametrize(
    ("change", "belongs"),
    [
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x.flatten(0, 1), True),
        (lambda x: x.reshape(-1, 6, 5), False),  # other numbers side by side
        (lambda x: x[:, 0], False),
    ],
)
def test_layouts_may_change_on_the_way_to_a_norm(change, belongs):
    assert layers_of(Moved(change), torch.randn(2, 5, 4)) == {"linear": "norm" if belongs else None}


def test_frozen_and_reparametrised_layers_are_left_out():
    model = plain()
    model[0].weight.requires_grad_(False)
    parametrizations.weight_norm(model[2])
    assert list(layers_of(model, batch(dtype=torch.float32)[0], HEADS["plain"])) == ["5"]
    with pytest.raises(ModelError, match="no convolution or Linear is left"):
        layers_of(model, batch(dtype=torch.float32)[0], ("5.weight", "7.weight"))
    with pytest.raises(InputError, match="^head: "):
        layers_of(model, batch(dtype=torch.float32)[0], ("nonsense",))


LAYERS = {
    "Linear": (lambda: nn.Linear(6, 8), (2, 6)),
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3), (2, 6, 5)),
    "Conv2d, groups": (lambda: nn.Conv2d(6, 8, 3, groups=2), (2, 6, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(6, 8, 2), (2, 6, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 8, 3, stride=2), (2, 6, 5)),
    "ConvTranspose2d, groups": (lambda: nn.ConvTranspose2d(6, 8, 3, groups=2), (2, 6, 4, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(6, 8, 2, bias=False), (2, 6, 2, 2, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_mask_silences_the_chosen_channels_and_no_other(name):
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, inputs = nn.Sequential(build()), torch.randn(shape)
    chosen = {"0": torch.tensor([True, False, False, True, False, True, False, False])}
    before = layer(inputs)
    parts = channels.mask(layer, [Layer("0", 8, None)], chosen)
    with torch.no_grad():
        for parameter, part in parts.items():
            layer.get_parameter(parameter).masked_fill_(part, 0)
    after = layer(inputs)
    assert not after[:, chosen["0"]].any()
    assert torch.equal(after[:, ~chosen["0"]], before[:, ~chosen["0"]])
    assert len(parts) == len(list(layer.parameters()))


def test_layers_that_share_a_weight_share_its_mask():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    chosen = {"0": torch.tensor([True, False, False, False]), "1": torch.tensor([False, True, False, False])}
    parts = channels.mask(model, [Layer("0", 4, None), Layer("1", 4, None)], chosen)
    assert parts["0.weight"].any(1).tolist() == [True, True, False, False]
    assert parts["0.bias"].tolist() == [True, False, False, False] and parts["1.bias"].tolist() == [False, True, False, False]
    assert parts.keys() == {"0.weight", "0.bias", "1.bias"}


@every_network
@pytest.mark.parametrize("before_norm", [False, True])
def test_sums_equal_the_loop(name, before_norm):
    model, (inputs, labels) = network(name), batch()
    layers = channels.find(model, (inputs, labels), head=HEADS[name])
    table = reference.activations(model, inputs, {n: n if before_norm or norm is None else norm for n, norm in NORMS[name].items()})
    found = activations.measure(model, [(inputs[:5], labels[:5]), (inputs[5:], labels[5:])], layers, before_norm=before_norm)
    assert (found.counts.tolist(), found.batches) == ([12], 2)
    by_class = activations.measure(model, [(inputs, labels)], layers, classes=[3, 0], before_norm=before_norm)
    assert by_class.counts.tolist() == [3, 3]
    for layer, rows in table.items():
        torch.testing.assert_close(found.sums[layer][0], rows.sum(0), rtol=1e-10, atol=1e-12)
        classes = torch.stack([rows[labels == 3].mean(0), rows[labels == 0].mean(0)])
        torch.testing.assert_close(by_class.mean()[layer], classes, rtol=1e-10, atol=1e-12)


def test_neither_order_nor_batch_size_matters():
    model, (inputs, labels) = network("residual"), batch(40)
    layers = channels.find(model, (inputs, labels))
    whole = activations.measure(model, [(inputs, labels)], layers)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    for size in (1, 7):
        parts = [(inputs[rows], labels[rows]) for rows in order.split(size)]
        for name, total in activations.measure(model, parts, layers).sums.items():
            torch.testing.assert_close(total, whole.sums[name], rtol=1e-12, atol=1e-12)


def test_a_million_samples_lose_nothing():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    samples = torch.full((4096, 1), 0.1)
    found = activations.measure(model, [(samples, samples)] * 256, [Layer("0", 1, None)])
    assert abs(found.mean()["0"].item() / float(samples[0]) - 1) < 1e-12


def test_pieces_are_only_for_speed(monkeypatch):
    model, held = network("dense"), batch()
    layers = channels.find(model, held)
    whole = activations.measure(model, [held], layers).sums
    monkeypatch.setattr(activations, "PIECE", 1)
    for name, total in activations.measure(model, [held], layers).sums.items():
        torch.testing.assert_close(total, whole[name], rtol=1e-12, atol=0)


def test_half_precision_is_summed_in_float32():
    values = torch.full((2, 3, 32, 32), 0.1, dtype=torch.bfloat16)
    values[:, :, 0, 0] = 7.0
    means = activations.rectified_means(values, 1)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means, values.double().mean((2, 3)).float(), rtol=1e-6, atol=0)


class Repeated(nn.Module):
    """A layer called twice, one on frames folded into the batch, and one that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.framed, self.seldom, self.head = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, x):
        samples, frames, _ = x.shape
        x = self.twice(self.twice(x).relu())
        if samples > 2:
            self.seldom(x)
        return self.head(self.framed(x.flatten(0, 1)).relu().unflatten(0, (samples, frames)).mean(1))


def test_calls_and_frames_are_averaged():
    torch.manual_seed(0)
    model, inputs, labels = Repeated().double(), torch.randn(5, 3, 4).double(), torch.tensor([0, 1, 0, 1, 1])
    layers = [Layer("twice", 4, None), Layer("framed", 3, None), Layer("seldom", 2, None)]
    found = activations.measure(model, [(inputs[:3], labels[:3]), (inputs[3:], labels[3:])], layers, classes=[0, 1]).sums
    with torch.no_grad():
        first = model.twice(inputs)
        second = model.twice(first.relu())
        framed, seldom = model.framed(second).relu().mean(1), model.seldom(second[:3]).relu().mean(1)
    expected = {"twice": (first.relu().mean(1) + second.relu().mean(1)) / 2, "framed": framed, "seldom": seldom}
    for name, rows in expected.items():
        members = labels[: len(rows)]
        by_class = torch.stack([rows[members == label].sum(0) for label in (0, 1)])
        torch.testing.assert_close(found[name], by_class, rtol=1e-10, atol=1e-12)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x[:2])


def test_rows_that_are_no_samples_are_refused_and_nothing_is_left_behind():
    model = Pooled()
    with assert_untouched(model), pytest.raises(ModelError, match="layer puts out 2 rows for 3 samples"):
        activations.measure(model, [(torch.randn(3, 4, generator=torch.Generator()), torch.zeros(3))], [Layer("layer", 2, None)])


@every_network
def test_the_model_is_untouched(name):
    model, held = network(name), batch()
    list(model.children())[0].train(False)
    with assert_untouched(model):
        activations.measure(model, [held], channels.find(model, held))


def test_own_objectives_reach_the_model():
    objective = Objective(outputs=lambda model, held: model(held["picture"]), targets=lambda held: held["digit"])
    model, (inputs, labels) = network("plain"), batch()
    held = {"picture": inputs, "digit": labels}
    layers = channels.find(model, held, objective)
    found = activations.measure(model, [held], layers, objective, classes=[1])
    expected = activations.measure(model, [(inputs, labels)], layers, classes=[1])
    assert all(torch.equal(total, expected.sums[name]) for name, total in found.sums.items())
    assert activations.labels([held], "forget", objective) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="forget: needs one integer label per sample; found torch.float64"):
        activations.labels([(inputs, inputs)], "forget")


def sums(values: list[list[float]], counts: list[int], batches: int = 1) -> Activations:
    return Activations({"layer": torch.tensor(values, dtype=torch.float64)}, torch.tensor(counts), batches)


def test_the_difference_is_of_means_over_samples_or_sums_over_batches():
    forget, remain = sums([[4.0, 2.0]], [4], batches=2), sums([[9.0, 0.0], [0.0, 9.0]], [3, 6], batches=3)
    assert scores.activation_difference(forget, remain)["layer"].tolist() == [1 - 1, 0.5 - 1]
    assert scores.activation_difference(forget, remain, "batches")["layer"].tolist() == [2 - 3, 1 - 3]
    assert scores.activation_difference(forget)["layer"].tolist() == [1, 0.5]
    with pytest.raises(InputError, match="remain: .* at least one sample"):
        scores.activation_difference(forget, sums([[0.0, 0.0]], [0]))
    with pytest.raises(MismatchError, match="different layers"):
        scores.activation_difference(forget, sums([[0.0]], [1]))


@pytest.mark.parametrize("forgotten", [{2}, {0, 3}])
@pytest.mark.parametrize("reading", ["text", "released"])
def test_tf_idf_equals_the_loop(forgotten, reading):
    table, labels = torch.rand(20, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).pow(4), torch.arange(20) % 4
    table[:, 5] = 0  # dead
    kept = sorted({0, 1, 2, 3} - forgotten)

    def of(classes):
        rows = [table[labels == label].sum(0).tolist() for label in classes]
        return sums([*rows, [0.0] * 7], [*[5] * len(classes), 0])  # a class without samples

    found = scores.tf_idf(of(sorted(forgotten)), of(kept), reading)["layer"]
    expected = reference.tf_idf(table, labels, forgotten, reading, absent=2)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-14)
    assert found[5] == 0
    with pytest.raises(InputError, match="forget: .* at least one sample"):
        scores.tf_idf(of([]), of(kept))
    with pytest.raises(MismatchError, match="different layers"):
        scores.tf_idf(of(kept), Activations({"other": torch.ones(1, 7)}, torch.tensor([1]), 1))
