"""On a GPU, with CUDA graphs, what the first samples do not show is computed right or refused, as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import adders, diagonal
from expunge.fisher.doubting import Doubts
from expunge.fisher.queueing import QueuedConfirmation
from tests import reference
from tests.fisher import patterns as on_cpu
from tests.fisher.cases import MODELS, build

DEVICE = "cuda"
K = on_cpu.K
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:nested_from_padded CUDA kernels only support"),
]


@pytest.fixture(autouse=True)
def confirmed(monkeypatch):
    monkeypatch.setattr(adders, "CONFIRMED_ON", ("cpu", "cuda"))


def moved(batches):
    return [tuple(tensor.to(DEVICE) for tensor in batch) for batch in batches]


def squares(model, batches, **settings):
    found = diagonal(copy.deepcopy(model).to(DEVICE).eval(), moved(batches), **settings)
    return {name: total.cpu() for name, total in found.sums.items()}


def check(model, batches, kind="empirical"):
    model = model.double().eval()
    assert reference.worst_error(squares(model, batches, kind=kind), on_cpu.looped(model, batches, kind)) <= 1e-9


def split(x, y, cuts):
    return list(zip(x.split(cuts), y.split(cuts), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name):
    model, batch = build(name)
    parts = list(zip(*(tensor.split(2) for tensor in batch), strict=True))
    twice = {name: 2 * total for name, total in reference.fisher(model, batch).items()}
    assert reference.worst_error(squares(model, [*parts, *parts]), twice) <= 1e-9


@pytest.mark.parametrize("kind", ["empirical", "expected"])
@pytest.mark.parametrize("how", ["module", "1-D", "transposed", "einsum"])
def test_a_branch_that_later_samples_take(how, kind):
    torch.manual_seed(0)
    batches = [on_cpu.vectors(), on_cpu.vectors(), on_cpu.vectors(4, 7), on_cpu.vectors(8)]
    check(on_cpu.Branch(how), batches, kind)


@pytest.mark.parametrize("black", [2, 6, 40])
def test_black_first_frames(black):
    torch.manual_seed(black)
    x = torch.randn(120, 3, 5).double()
    x[:black] = 0
    for cuts in ([120], [40] * 3, [20] * 6, [8] * 15):
        check(on_cpu.Video(), split(x, on_cpu.labels(120), cuts))


@pytest.mark.parametrize("inner", [on_cpu.Rolled, on_cpu.Transposed])
@pytest.mark.parametrize("shut", [2, 45])
def test_gates_shut_for_the_first_samples(inner, shut):
    torch.manual_seed(shut)
    x = torch.randn(100, 3, 5).double()
    x[:, 0, 0] = x[:, 0, 0].abs() + 0.1
    x[:shut, 0, 0] *= -1
    for cuts in ([20] * 5, [10] * 10):
        check(on_cpu.Gated(inner(5, 5)), split(x, on_cpu.labels(100), cuts))


@pytest.mark.parametrize("first", [(1, 1), (1, -1)])
def test_one_hot_dispatch_to_experts(first):
    torch.manual_seed(0)
    x = torch.randn(54, 5).double()
    x[:2, 0] = torch.tensor(first) * x[:2, 0].abs()
    check(on_cpu.Dispatched(), split(x, on_cpu.labels(54), [18] * 3))


@pytest.mark.parametrize("how", ["cat", "masked_select", "list", "loop"])
def test_unpadding(how):
    torch.manual_seed(0)
    lengths = torch.randint(1, 7, (4, 18))
    batches = [(torch.randn(18, 6, 5).double(), torch.arange(6)[None] < each[:, None], on_cpu.labels(18)) for each in lengths]
    check(on_cpu.Unpadded(how), batches)


class PathOnDevice(nn.Linear):
    """Drop path left on, drawn by the GPU's own generator."""

    def forward(self, x):
        return super().forward(x) * (torch.rand(len(x), 1, device=x.device) > 0.2)


@pytest.mark.parametrize("model", [on_cpu.Centred, on_cpu.Scaled, on_cpu.Normalised, on_cpu.Dropping, PathOnDevice, on_cpu.Moving])
@pytest.mark.parametrize("first", ["copies", "zeros"])
def test_samples_that_depend_on_their_batch(model, first):
    torch.manual_seed(0)
    x = torch.randn(100, 5).double()
    x[:25] = x[:1] + 1e-9 * torch.randn(25, 5) if first == "copies" else 0
    with pytest.raises(
        (ModelError, InputError), match="changes with the rest of its batch, or from call to call|Expected more than 1 value"
    ):
        squares(model(5, K).double(), split(x, on_cpu.labels(100), [25] * 4))


@pytest.mark.parametrize("losses", [on_cpu.class_weighted, on_cpu.standardised, on_cpu.noisy])
def test_losses_that_depend_on_the_batch(losses):
    x, y = torch.randn(80, 5).double(), on_cpu.labels(80)
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        squares(nn.Linear(5, K).double(), split(x, y, [20] * 4), objective=Objective(losses=losses))


def test_frozen_encoder_with_a_padding_mask():
    torch.manual_seed(0)
    model, x, y = on_cpu.Encoder().double().eval(), torch.randn(6, 5, 8).double(), on_cpu.labels(6)
    mask = torch.arange(5)[None] >= torch.tensor((5, 5, 2, 4, 1, 5))[:, None]
    expected = {"head.weight": 0, "head.bias": 0}
    for n in range(6):
        logits = model(x[n : n + 1], mask[n : n + 1])
        wanted = [model.get_parameter(name) for name in expected]
        for name, gradient in zip(expected, torch.autograd.grad(F.cross_entropy(logits, y[n : n + 1]), wanted), strict=True):
            expected[name] = expected[name] + gradient**2
    assert reference.worst_error(squares(model, [(x, mask, y)]), expected) <= 1e-9


class Late(nn.Module):
    """Frames folded frame by frame, black for whole batches: only samples of replayed graphs show the order."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.video = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten()), on_cpu.Video()
        self.head = nn.Linear(128, K)

    def forward(self, x, frames):
        return self.head(self.image(x)) + self.video(frames)


def late(count: int, size: int, black: int, dtype: torch.dtype):
    torch.manual_seed(1)
    x, frames = torch.randn(count * size, 3, 6, 6, dtype=dtype), torch.randn(count * size, 3, 5, dtype=dtype)
    frames[: black * size] = 0
    return list(zip(x.split(size), frames.split(size), on_cpu.labels(count * size).split(size), strict=True))


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_that_only_replayed_graphs_show(dtype, allow):
    torch.manual_seed(0)
    model, batches = Late().to(dtype).eval(), late(8, 32, 5, dtype)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allow):
        found = squares(model, batches)
    exact = 1e-9 if dtype == torch.float64 else (2e-2 if allow else 1e-4)
    assert reference.worst_error(found, on_cpu.looped(model, batches)) <= exact


@pytest.mark.parametrize("allow", [False, True])
def test_false_alarms_of_rounding_do_no_harm(allow, monkeypatch):
    """No sound model is computed one sample at a time: nothing is revised, and whole batches in float64 are few."""
    torch.manual_seed(0)
    widths = [3, 16, 16, 32, 32]
    layers = [
        layer
        for one, two in zip(widths, widths[1:], strict=False)
        for layer in (nn.Conv2d(one, two, 3, padding=1), nn.BatchNorm2d(two), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 64, K)).eval()
    revised, whole, over = [], [], Doubts.over_the_whole_batch
    monkeypatch.setattr(adders.Plan, "revise", lambda self, names: revised.append(names))
    monkeypatch.setattr(Doubts, "over_the_whole_batch", lambda *arguments: whole.append(1) or over(*arguments))
    batches = [(torch.randn(64, 3, 16, 16), on_cpu.labels(64)) for _ in range(12)]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allow):
        whole_data, first = squares(model, batches), squares(model, batches[:1])
    assert not revised and len(whole) <= 2
    assert all(bool((whole_data[name] >= 0.9 * first[name]).all()) for name in first)
    assert reference.worst_error(first, on_cpu.looped(model, batches[:1])) <= (5e-2 if allow else 1e-3)


def test_samples_of_every_batch_are_compared(monkeypatch):
    drawn, add = [], QueuedConfirmation.add
    monkeypatch.setattr(QueuedConfirmation, "add", lambda self, kept, *rest: drawn.append(kept.rows.tolist()) or add(self, kept, *rest))
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, K))
    squares(model, split(torch.randn(240, 5), on_cpu.labels(240), [40] * 6))
    assert len(drawn) == 6 and len({tuple(rows) for rows in drawn}) > 1


def test_the_same_call_gives_the_same_bits():
    model, batches = on_cpu.Video().double(), late(4, 20, 0, torch.float64)
    batches = [batch[1:] for batch in batches]
    one, two = squares(model, batches), squares(model, batches)
    assert all(torch.equal(one[name], two[name]) for name in one)
