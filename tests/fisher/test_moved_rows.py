"""Rows that a rare branch moves to other samples' places, and parameters used out of torch.func's sight: equal to the loop over samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.fisher import plan
from expunge.fisher.planned import picked
from tests.fisher.patterns import K, check, labels

pytestmark = pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning")
SAMPLES, TOKENS = 96, 4


class Dispatched(nn.Module):
    """Tokens with a large entry go through a layer in the order of their arrival, in a table that has room for all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.rare, self.head = how, nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        rows = self.first(x).flatten(0, 1)
        sent = (x[..., 0] > 1.2).flatten()
        slots = (sent.long().cumsum(0) - 1).clamp(min=0)
        table, kept = torch.zeros_like(rows), rows * sent[:, None]
        if self.how == "product":
            matrix = F.one_hot(slots, len(rows)).to(rows) * sent[:, None]
            return self.pooled(rows + matrix @ torch.tanh(self.rare(matrix.T @ rows)), x)
        if self.how == "list":
            for slot, row in enumerate(sent.nonzero().flatten().tolist()):
                table[slot] = rows[row]
        elif self.how == "index_add":
            table = table.index_add(0, slots, kept)
        elif self.how == "scatter_add":
            table = table.scatter_add(0, slots[:, None].expand_as(rows), kept)
        else:
            table = table.index_put((slots,), kept, accumulate=True)
        return self.pooled(rows + torch.tanh(self.rare(table))[slots] * sent[:, None], x)

    def pooled(self, rows, x):
        return self.head(rows.view(x.shape).mean(1))


def arriving(seed: int):
    """The first sample's only such token keeps its place; pairs of later samples have two each, of which all but the first are moved."""
    torch.manual_seed(seed)
    x = torch.randn(SAMPLES, TOKENS, 5).double().clamp(-2, 1)
    x[0, 1, 0] = 2
    x[[21, 22, 45, 46], :2, 0] = 1.5
    return x, labels(SAMPLES)


@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize("how", ["product", "list", "index_add", "scatter_add", "index_put"])
def test_rows_that_few_samples_send_to_places_of_others(how, size):
    for seed in range(3):
        x, y = arriving(seed)
        check(Dispatched(how), list(zip(x.split(size), y.split(size), strict=True)))


class OtherReference(nn.Module):
    """A weight without a closed form, which a gate multiplies once more, by a reference that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.head = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5)), nn.Linear(5, K)
        self.again = [self.weight]

    def forward(self, x):
        y = torch.tanh(x @ (0.1 * self.weight.exp()) + self.bias)
        return self.head(y + (x[:, :1] > 1.2) * torch.tanh(x @ self.again[0].T.exp()))


def test_a_use_that_torch_func_cannot_see_and_few_samples_show():
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = OtherReference(), torch.randn(SAMPLES, 5).double().clamp(-2, 1)
        x[[21, 22, 45, 46], 0] = 1.5
        batches = list(zip(x.split(8), labels(SAMPLES).split(8), strict=True))
        for kind in ("empirical", "expected"):
            check(model, batches, kind)
        assert plan(model, batches[0]).named("loop") == ["weight"]


class AmongCopies(nn.Module):
    """A layer used again on the samples in another order, or on gradients in another order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.head = how, nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        if self.how == "hook":
            x = torch.tanh(self.layer(x))
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.flip(0))
            return self.head(x)
        other = torch.tanh(self.layer(self.moved(x, 1)))
        return self.head(torch.tanh(self.layer(x)) + self.moved(other, -1))

    def moved(self, x, by: int):
        if self.how == "joined":
            return torch.cat([x[by:], x[:by]])
        return torch.eye(len(x), dtype=x.dtype)[[(row + by) % len(x) for row in range(len(x))]] @ x


@pytest.mark.parametrize("how", ["joined", "product", "hook"])
def test_rows_that_are_moved_among_copies_of_one_sample(how):
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(1, 5).double().repeat(40, 1)
        x[[21, 33]] = torch.randn(2, 5).double()
        check(AmongCopies(how), [(x, labels(40))], "expected")


def test_the_label_at_which_samples_are_compared_is_one_that_counts():
    rows, likely, unlikely = torch.tensor([0, 2]), torch.ones(3, 4), torch.full((3, 4), 1e-7)
    picks = [0.1, 0.3, 0.6, 0.999]
    assert [picked([unlikely, likely, unlikely], rows, pick) for pick in picks] == [1, 1, 1, 1]
    assert [picked([likely, likely], rows, pick) for pick in picks] == [0, 0, 1, 1]
    assert [picked([torch.zeros(3, 4)] * 2, rows, pick) for pick in picks] == [0, 0, 1, 1]
