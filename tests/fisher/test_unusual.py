"""Models and data that crashed, or that torch itself computes in two ways, equal the loop over samples in float64."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import diagonal, plan
from tests import reference
from tests.fisher.patterns import (
    Encoder,
    K,
    check,
    labels,
    looped,
    vectors,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


class Listed(nn.Module):
    """Takes the lengths as a list of Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, lengths):
        rows = torch.tanh(self.layer(x))
        return self.head(torch.stack([row[:length].mean(0) for row, length in zip(rows, lengths, strict=True)]))


@pytest.mark.parametrize("form", [list, numpy.array])
def test_list_valued_entries(form):
    model, x, y, lengths = Listed().double(), torch.randn(6, 4, 5).double(), labels(6), [4, 4, 1, 3, 2, 4]
    expected = None
    for n in range(6):
        part = reference.fisher(Fixed(model, [lengths[n]]), (x[n : n + 1], y[n : n + 1]))
        expected = part if expected is None else {name: expected[name] + part[name] for name in part}
    outputs = Objective(outputs=lambda model, batch: model(batch["x"], batch["lengths"]), targets=lambda batch: batch["labels"])
    found = diagonal(model, [{"x": x, "lengths": form(lengths), "labels": y}], objective=outputs).sums
    assert reference.worst_error({f"model.{name}": value for name, value in found.items()}, expected) <= 1e-10


class Fixed(nn.Module):
    def __init__(self, model, lengths) -> None:
        super().__init__()
        self.model, self.lengths = model, lengths

    def forward(self, x):
        return self.model(x, self.lengths)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("lengths", [(5, 5, 2, 4, 1, 5), (3, 1, 5, 2, 2, 4)])
def test_frozen_encoder_with_a_padding_mask(lengths):
    torch.manual_seed(0)
    model = Encoder().double().eval()
    x, y = torch.randn(6, 5, 8).double(), labels(6)
    mask = torch.arange(5)[None] >= torch.tensor(lengths)[:, None]
    expected = {}
    for n in range(6):
        logits = model(x[n : n + 1], mask[n : n + 1])
        for name in ("head.weight", "head.bias"):
            gradient = torch.autograd.grad(F.cross_entropy(logits, y[n : n + 1]), model.get_parameter(name), retain_graph=True)[0]
            expected[name] = expected.get(name, 0) + gradient**2
    assert reference.worst_error(diagonal(model, [(x, mask, y)]).sums, expected) <= 1e-10


class Written(nn.Module):
    """Writes through a view of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Linear(4, K)

    def forward(self, x):
        out = self.first(x)
        out.view(len(out), -1)[:, ::3] *= 2
        return self.head(torch.tanh(self.second(out)).mean((2, 3)))


def test_writes_through_a_view():
    torch.manual_seed(0)
    check(Written(), [(torch.randn(7, 2, 5, 5).double(), labels(7)), (torch.randn(7, 2, 5, 5).double(), labels(7))])


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(10, K)

    def forward(self, x):
        return self.head(torch.repeat_interleave(torch.tanh(self.layer(x)), repeats=2, dim=1))


class Energy(nn.Module):
    """Differentiates inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(5, K)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(self.layer(x)).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(force)


@pytest.mark.parametrize("model", [Repeated, Energy])
def test_what_crashed_runs(model):
    torch.manual_seed(0)
    check(model(), [vectors(), vectors(samples=3), vectors(samples=1)])


def test_a_batch_of_one_with_a_foreign_tensor_that_requires_grad():
    class Holding(nn.Linear):
        other = torch.ones(5, dtype=torch.float64, requires_grad=True)

        def forward(self, x):
            return super().forward(x * self.other)

    model, x, y = Holding(5, K).double(), torch.randn(3, 5).double(), labels(3)
    single = diagonal(model, [(x[n : n + 1], y[n : n + 1]) for n in range(3)]).sums
    assert reference.worst_error(single, diagonal(model, [(x, y)]).sums) <= 1e-12
    assert Holding.other.grad is None


@pytest.mark.parametrize("channels", [1, 6])
def test_prelu_behind_zeros(channels):
    """torch.func mixes up the samples of gradients behind a PReLU, but not those of zeros."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.slope, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.PReLU(channels), nn.Linear(6, K)

        def forward(self, x):
            x = F.conv2d(x, self.layer.weight.flip(-1), None, padding=1)
            return self.head((x + self.slope(x)).amax((2, 3)))

    torch.manual_seed(0)
    x = torch.randn(12, 6, 4, 3).double()
    x[:3] = 0
    for cuts in ([2, 2, 8], [12], [3, 9]):
        check(Gate(), list(zip(x.split(cuts), labels(12).split(cuts), strict=True)))


class Turning(nn.Module):
    """Without a closed form, and from the second batch on with a branch that torch.func cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head, self.calls = nn.Parameter(torch.randn(5)), nn.Linear(5, K), 0

    def forward(self, x):
        scale = torch.exp(self.weight).cumsum(0)
        if len(x.shape) == 2 and x.shape[1] == 5:
            return self.head(torch.tanh(x * scale))
        x = x[:, :5]
        return self.head(torch.tanh(x * scale) if bool((x[:, 0] > -1e9).all()) else x)


def test_torch_func_may_fail_on_a_later_batch():
    torch.manual_seed(0)
    wide = torch.randn(4, 6).double(), labels(4)
    check(Turning(), [vectors(samples=4), wide])


def test_thin_images_with_a_stride_and_a_dilation():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, (3, 1), stride=2, padding=1, dilation=2)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(6, K))
    check(model, [(torch.randn(5, 2, 4, 1).double(), labels(5))])
    diagonal(model.float(), [(torch.randn(5, 2, 4, 1), labels(5))])  # it was float32 that ended the process


def test_group_norm_in_channels_last_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, K))
    check(model, [(torch.randn(5, 4, 3, 3).double().contiguous(memory_format=torch.channels_last), labels(5))])


def test_lists_of_mapping_batches_with_numbers():
    class Named(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    model, (x, y) = Named(5, K).double(), vectors()
    found = diagonal(model, [{"x": x[:4], "scale": 2.0, "labels": y[:4]}, {"x": x[4:], "scale": 2.0, "labels": y[4:]}])
    doubled = nn.Linear(5, K).double()
    doubled.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    assert found.count == 9
    expected = {name: 4 * value for name, value in looped(doubled, [(x, y)]).items()}
    assert reference.worst_error(found.sums, expected) <= 1e-10


def test_refused_clearly():
    model, batch = nn.Linear(5, K).double(), vectors()
    with pytest.raises(InputError, match="objective: must be an Objective"):
        diagonal(model, [batch], objective=F.cross_entropy)
    for lazy in (nn.LazyLinear(K), nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(5, K))):
        with pytest.raises(ModelError, match="call the model once on a batch first"):
            diagonal(lazy, [batch])
    for strange in (batch[0].to_sparse(), torch.nested.nested_tensor(list(batch[0]), layout=torch.jagged)):
        with pytest.raises(InputError, match="tensors must be dense"):
            diagonal(model, [(strange, batch[1])])
    exported = torch.export.export(nn.Sequential(model), batch[:1]).module()
    with pytest.raises(ModelError, match="must have train and eval modes"):
        diagonal(exported, [batch])


class Logarithms(nn.Linear):
    def forward(self, x):
        return super().forward(torch.log(x))


@pytest.mark.parametrize("size", [2, 7])
def test_an_output_that_is_not_finite_is_not_put_down_to_the_batch(size):
    x, y = torch.rand(14, 5).double() + 0.1, labels(14)
    x[9, 2] = -1
    with pytest.raises(ModelError, match="the model's output is not finite for a sample"):
        diagonal(Logarithms(5, K).double(), list(zip(x.split(size), y.split(size), strict=True)))


@pytest.mark.parametrize("count", [1, 6])
def test_losses_may_work_in_place(count):
    def in_place(logits, targets):
        targets.clamp_(max=K - 1)
        return F.cross_entropy(logits.mul_(1.0), targets, reduction="none")

    model, (x, y) = nn.Linear(5, K).double(), vectors(samples=count)
    before = y.clone()
    found = diagonal(model, [(x, y)] * 2, objective=Objective(losses=in_place)).sums
    assert reference.worst_error(found, looped(model, [(x, y)] * 2)) <= 1e-10
    assert torch.equal(y, before)


class AfterTable(nn.Module):
    """A frozen encoder behind a trained table: torch's fast path is open only to passes in which the table needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 8), nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, K)
        self.layer.requires_grad_(False)

    def forward(self, tokens, mask):
        out = self.layer(self.table.weight[tokens], src_key_padding_mask=mask)
        return self.head(out.mean(1))


def test_frozen_encoder_behind_a_table():
    torch.manual_seed(0)
    model, tokens, y = AfterTable().double().eval(), torch.randint(0, 7, (6, 5)), labels(6)
    mask = torch.arange(5)[None] >= torch.tensor([5, 5, 2, 4, 1, 3])[:, None]
    names, expected = ("table.weight", "head.weight", "head.bias"), {}
    for n in range(6):
        loss = F.cross_entropy(model(tokens[n : n + 1], mask[n : n + 1]), y[n : n + 1])
        for name, gradient in zip(names, torch.autograd.grad(loss, [model.get_parameter(name) for name in names]), strict=True):
            expected[name] = expected.get(name, 0) + gradient**2
    assert reference.worst_error(diagonal(model, [(tokens, mask, y)]).sums, expected) <= 1e-10


class WrittenSlice(nn.Module):
    """Adds to a line of an image one pixel wide: a view of a single sample has other strides there than the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(4, 4, 1, (3, 2), (1, 0)), nn.Conv2d(4, 4, 1), nn.Linear(4, K)

    def forward(self, x):
        before = self.first(x)
        out = before.clone()
        out[:, :, 0] += self.second(before)[:, :, 0]
        return self.head(out.flatten(2).amax(2))


def test_writes_to_a_slice_of_a_thin_image():
    torch.manual_seed(0)
    x = torch.randn(4, 4, 4, 2).double().contiguous(memory_format=torch.channels_last)
    check(WrittenSlice().to(memory_format=torch.channels_last), [(x, labels(4))])


class Squeezed(nn.Module):
    """Also of the dimension of the samples, where there is but one."""

    def __init__(self, outputs: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(5, outputs), norm or nn.Identity()

    def forward(self, x):
        return self.norm(self.head(x[:, None]).squeeze())


NORM = nn.BatchNorm1d(K, affine=False)
ALONE = "two samples are taken, but not one alone: squeeze"
SQUEEZED = {
    "class logits": (
        Squeezed(K),
        Objective(),
        ModelError,
        rf"alone it has shape \({K},\), beside another \(1, {K}\); squeeze\(\), say, drops",
    ),
    "numbers": (
        Squeezed(1),
        Objective(losses=lambda z, y: (z - y) ** 2),
        InputError,
        rf"^objective.outputs: .*; {ALONE}.*; found a single number",
    ),
    "a norm": (Squeezed(K, NORM), Objective(), InputError, rf"^batch(es)?: must be what the model .* raised .*; {ALONE}"),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_a_squeeze_of_the_samples_is_named_without_a_warning_of_another_reason(name, recwarn):
    model, objective, error, told = SQUEEZED[name]
    batch = torch.randn(6, 5), labels(6)
    for call in (lambda: diagonal(model, [batch], objective=objective), lambda: plan(model, batch, objective=objective)):
        with pytest.raises(error, match=told):
            call()
    assert not recwarn.list
