"""In float32 a flipped ReLU is no error of the plan, and small errors of the plan are not put down to flipped ReLUs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.fisher import diagonal
from expunge.fisher.comparing import NOISE
from expunge.fisher.doubting import Doubts
from expunge.fisher.planning.plan import Plan
from tests import reference
from tests.fisher import patterns
from tests.fuzz.modules.definition import defined

K = patterns.K
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


@pytest.fixture
def events(monkeypatch):
    """How often a doubt came up, went to the whole batch, and revised the plan."""
    counts = {"doubts": 0, "whole": 0, "revised": 0}

    def counted(place, name, event):
        original = getattr(place, name)

        def call(*arguments):
            counts[event] += 1
            return original(*arguments)

        monkeypatch.setattr(place, name, call)

    counted(Doubts, "unexplained", "doubts")
    counted(Doubts, "over_the_whole_batch", "whole")
    counted(Plan, "revise", "revised")
    return counts


def error(model: nn.Module, batches, like: nn.Module | None = None) -> float:
    if like is not None:
        like.load_state_dict(model.state_dict())
    return reference.worst_error(diagonal(model, batches).sums, patterns.looped(like or model, batches))


class Dense(nn.Module):
    """Many ReLUs, and a classifier by `view`, which channels-last memory does not have."""

    def __init__(self, by_view: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 8 * index, 8, 3, padding=1) for index in range(10))
        self.head, self.by_view = nn.Linear(83 * 36, K), by_view

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, 3 * F.relu(layer(x))], 1)
        return self.head(x.view(len(x), -1) if self.by_view else x.flatten(1))


@pytest.mark.parametrize("by_view", [True, False])
def test_flipped_relus_cost_no_whole_batch(by_view, events, monkeypatch):
    def tight(self, tensor):
        return 1e-2 if tensor.dim() == 2 and tensor.shape[1] == K else 1e-7  # of gradients every rounding is a doubt, of logits none

    monkeypatch.setattr("expunge.fisher.confirming.Confirmation.tolerated", tight)
    monkeypatch.setitem(NOISE, torch.float32, 0.0)
    torch.manual_seed(0)
    batches = [(torch.randn(32, 3, 6, 6), patterns.labels(32)) for _ in range(3)]
    assert error(Dense(by_view).eval(), batches) <= 1e-3
    assert events["doubts"] and not (events["whole"] or events["revised"])


def test_doubts_about_scores_of_one_number(events, monkeypatch):
    monkeypatch.setattr("expunge.fisher.confirming.Confirmation.tolerated", lambda self, tensor: 1e-2 if tensor.dim() < 2 else 1e-7)
    monkeypatch.setitem(NOISE, torch.float32, 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1), nn.Flatten(0))
    objective = Objective(losses=lambda scores, targets: (scores - targets).square() / 2, classes=False)
    batches = [(torch.randn(40, 5), torch.randn(40)) for _ in range(3)]
    found, double = diagonal(model, batches, objective=objective).sums, copy.deepcopy(model).double()
    wide = [(x.double(), y.double()) for x, y in batches]
    assert reference.worst_error(found, defined(double, wide, objective, "empirical")) <= 1e-3
    assert events["doubts"] and not events["revised"]


class Faint(nn.Module):
    """A layer used once more, faintly and out of sight."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.layer, self.head = torch.jit.script(nn.Linear(5, 5)) if scripted else nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        out = torch.relu(F.linear(x, self.layer.weight, self.layer.bias))
        return self.head(out + 0.02 * (x[:, :1] > 50) * torch.tanh(self.layer(out / 100)))


def test_a_faint_second_use(events):
    torch.manual_seed(0)
    batches = [
        tuple(part.float() if part.is_floating_point() else part for part in patterns.vectors(*large, samples=20))
        for large in ((), range(20))
    ]
    assert error(Faint(True), batches, Faint(False)) <= 1e-4


class WrittenFaintly(nn.Module):
    """Writes through `flatten`, which is a view in planes and a copy in channels-last memory, behind a gate that is shut at first."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.first, self.second, self.head, self.strength = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Linear(4, K), strength

    def forward(self, x):
        out = self.first(x)
        out.flatten(1)[:, ::3] *= 1 + self.strength * (x[:, 0, :1, 0] > 0)
        return self.head(torch.relu(self.second(out)).mean((2, 3)))


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_writes_through_flatten(strength):
    torch.manual_seed(0)
    x = torch.randn(60, 2, 5, 5)
    x[:, 0, 0, 0] = x[:, 0, 0, 0].abs() + 0.1
    x[:3, 0, 0, 0] *= -1
    assert error(WrittenFaintly(strength), split(x, [20] * 3)) <= 1e-4


def split(x, cuts):
    return list(zip(x.split(cuts), patterns.labels(len(x)).split(cuts), strict=True))


class Slight(nn.Module):
    """Frames in the order of the frames, of little weight, black at first."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.video, self.head, self.weight = patterns.Video(), nn.Linear(5, K), weight

    def forward(self, x):
        return self.weight * self.video(x) + self.head(torch.relu(x[:, 0]))


@pytest.mark.parametrize("weight", [1.0, 0.01])
def test_black_first_frames(weight):
    torch.manual_seed(0)
    x = torch.randn(80, 3, 5)
    x[:22] = 0
    assert error(Slight(weight), split(x, [20] * 4)) <= 1e-4


@pytest.mark.parametrize("first", [(1, 1), (1, -1)])
def test_one_hot_dispatch(first):
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    x[:2, 0] = torch.tensor(first) * x[:2, 0].abs()
    assert error(patterns.Dispatched(), split(x, [20] * 3)) <= 1e-4


class Straight(nn.Module):
    """A factor that is 1 for every batch, whose gradient mixes the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        out = torch.relu(self.layer(x))
        size = out.norm()
        return self.head(out * (size / size.detach().clamp(min=1e-6)))


def test_a_coupling_of_gradients_alone():
    """One sample at a time it is what the definition says."""
    torch.manual_seed(0)
    assert error(Straight(), split(torch.randn(60, 5), [20] * 3)) <= 1e-4


class Shut(nn.Module):
    """A faint layer that has the samples' rows step by step, behind a gate that is all but shut for the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, K)

    def forward(self, x):
        steps = self.layer(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], len(x), 4).transpose(0, 1)
        return self.head((x + 1e-6 * torch.sigmoid(20 * x[:, :1, :1]) * torch.tanh(steps))[:, -1])


def test_the_largest_gradient_tells_what_is_rounding():
    """Two equal samples do not tell the order of the rows; what they have of the layer's gradient is rounding, unlike that of others."""
    torch.manual_seed(0)
    model, x, y = Shut().eval(), torch.randn(9, 3, 4), torch.randint(0, K, (9,))
    x[:3] = -2
    found, expected = diagonal(model, [(x, y)]).sums, reference.fisher(copy.deepcopy(model).double(), (x.double(), y))
    assert reference.worst_error(found, expected) <= 1e-3


class Rolled(nn.Module):
    """A bare parameter, again and faintly on the samples in another order; black samples first, which have no rows to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, K)

    def forward(self, x):
        gate, others = (x[:, :1] > 0).to(x.dtype), torch.eye(len(x), dtype=x.dtype).roll(1, 1) @ x
        return self.head(x * self.vector + 1e-2 * gate * (others * self.vector).roll(1, 0))


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_apart_by_little_are_not_put_down_to_flips(seed):
    torch.manual_seed(seed)
    x = torch.randn(4, 4)
    x[:2] = 0
    assert error(Rolled(), split(x, [2, 2])) <= 1e-4
