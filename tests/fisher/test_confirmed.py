"""What the first samples of the data do not show: each case equals the loop over samples in float64, or is refused with the reason."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.errors import ModelError
from expunge.fisher import diagonal
from tests import reference
from tests.fisher.patterns import (
    Branch,
    Dispatched,
    Gated,
    K,
    Rolled,
    Transposed,
    Unpadded,
    Video,
    check,
    labels,
    looped,
    vectors,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


@pytest.mark.parametrize("kind", ["empirical", "expected"])
@pytest.mark.parametrize("how", ["module", "1-D", "transposed", "einsum", "scripted"])
def test_a_branch_that_later_samples_take(how, kind):
    torch.manual_seed(0)
    check(Branch(how), [vectors(), vectors(4, 7), vectors(8), vectors(0, samples=2)], kind, like=Branch("module"))


class Both(nn.Module):
    """A layer with a closed form, used once more, out of sight, by large samples."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.layer, self.head = torch.jit.script(nn.Linear(5, 5).double()) if scripted else nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        out = torch.tanh(F.linear(x, self.layer.weight, self.layer.bias))
        large = x[:, :1] > 50
        return self.head(torch.where(large, torch.tanh(self.layer(out)), out) if bool(large.any()) else out)


def test_a_second_use_out_of_sight():
    torch.manual_seed(0)
    check(Both(True), [vectors(), vectors(5), vectors(2, 3)], like=Both(False))


@pytest.mark.parametrize("black", [2, 6, 8])
def test_black_first_frames(black):
    torch.manual_seed(black)
    x = torch.randn(16, 3, 5).double()
    x[:black] = 0
    for cuts in ([16], [8, 8], [2, 7, 7]):
        check(Video(), list(zip(x.split(cuts), labels(16).split(cuts), strict=True)))


@pytest.mark.parametrize("inner", [Rolled, Transposed, nn.Linear])
@pytest.mark.parametrize("shut", [2, 5, 9])
def test_gates_shut_for_the_first_samples(inner, shut):
    torch.manual_seed(shut)
    x = torch.randn(20, 3, 5).double()
    x[:, 0, 0] = x[:, 0, 0].abs() + 0.1
    x[:shut, 0, 0] *= -1
    for cuts in ([20], [10, 10], [2, 9, 9]):
        check(Gated(inner(5, 5)), list(zip(x.split(cuts), labels(20).split(cuts), strict=True)))


@pytest.mark.parametrize("first", [(1, 1), (-1, -1), (1, -1), (-1, 1)])
def test_one_hot_dispatch_to_experts(first):
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(9, 5).double()
        x[:2, 0] = torch.tensor(first) * x[:2, 0].abs()
        check(Dispatched(), [(x, labels(9)), (torch.randn(9, 5).double(), labels(9))])


def test_experts_with_too_few_places():
    x = torch.randn(9, 5).double()
    x[:, 0] = torch.tensor([1, -1, 1, 1, 1, 1, -1, 1, 1]) * x[:, 0].abs()
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(Dispatched(capacity=2).double(), [(x, labels(9))])


@pytest.mark.parametrize("lengths", [(3, 3, 2, 4), (3, 3, 1, 5, 2, 4), (2, 2, 2, 2, 5, 1, 1, 1, 2, 2), (3, 3, 3, 3)])
@pytest.mark.parametrize("how", ["cat", "masked_select", "list", "numpy", "loop", "values"])
def test_unpadding_in_all_its_spellings(how, lengths):
    torch.manual_seed(0)
    more = lengths[::-1]
    batches = [
        (torch.randn(len(each), 6, 5).double(), torch.arange(6)[None] < torch.tensor(each)[:, None], labels(len(each)))
        for each in (lengths, more)
    ]
    check(Unpadded(how), batches)


class Doubled(nn.Module):
    """Both readings of a sample go through the layers together, the batch twice; a gate is shut for zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores, self.filter = nn.Parameter(torch.randn(3, 4, 4)), nn.Linear(4, 3), nn.Conv1d(1, 2, 3, padding=1)
        self.head = nn.Linear(4, K, bias=False)

    def forward(self, x):
        both = torch.cat([x, x.flip(-1)])
        inner = torch.einsum("nd,kde,nk->ne", both, self.table, self.scores(both).softmax(-1))
        both = both + F.relu(both.sum(1, keepdim=True)) * self.filter(inner[:, None]).mean(1)
        return self.head(both[: len(x)] + both[len(x) :])


@pytest.mark.parametrize("sizes", [[3, 3, 3, 2], [2, 9], [4, 4, 3], [11]])
def test_one_sample_with_a_gradient_at_the_end(sizes):
    """When it comes, only some of the uses of parameters have their turn; those that it alone can show are compared all the same."""
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.zeros(11, 4).double()
        x[-1] = torch.rand(4) + 0.1
        check(Doubled(), list(zip(x.split(sizes), labels(11).split(sizes), strict=True)))


def test_false_alarms_of_rounding_do_no_harm():
    """A ReLU that flips by rounding changes a gradient by percents: the check asks again in float64, and the closed forms stay."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), *(layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(64, 64))), nn.ReLU(), nn.Linear(64, K)
    )
    batches = [(torch.randn(32, 64), labels(32)) for _ in range(20)]
    assert reference.worst_error(diagonal(model, batches).sums, looped(model, batches)) <= 1e-4


def test_the_same_call_gives_the_same_bits_and_draws_nothing():
    model, batches = Video().double(), [(torch.randn(8, 3, 5).double(), labels(8)) for _ in range(3)]
    state = torch.random.get_rng_state(), numpy.random.get_state()[1].copy()
    one, two = diagonal(model, batches), diagonal(model, batches)
    assert all(torch.equal(one.sums[name], two.sums[name]) for name in one.sums)
    assert torch.equal(torch.random.get_rng_state(), state[0]) and numpy.array_equal(numpy.random.get_state()[1], state[1])
