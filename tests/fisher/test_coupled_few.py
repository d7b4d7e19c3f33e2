"""Couplings that few samples of large batches show are refused: by the loops, which see every sample alone, or by the operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import ModelError
from expunge.fisher import diagonal
from expunge.fisher.absolute_values import absolute
from expunge.fisher.planning.survey import survey
from tests.fisher.patterns import K, check, labels

SAMPLES, PLACES = 64, 31  # an expert's, of which one gets a few more samples in a batch


class Experts(nn.Module):
    """Each sample goes to one of three experts, which have places for so many samples of a batch."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places, self.gate, self.head = places, nn.Linear(5, 3), nn.Linear(6, K)
        self.experts = nn.ModuleList(nn.Linear(5, 6) for _ in range(3))


class ByRows(Experts):
    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 6)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[: self.places, 0]
            out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return self.head(out)


class ByMask(Experts):
    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        mask = F.one_hot(chosen, 3)
        mask = mask * (mask.cumsum(0) <= self.places)
        return self.head(sum(mask[:, number, None] * weight[:, None] * torch.tanh(expert(x)) for number, expert in enumerate(self.experts)))


class Pairs(nn.Linear):
    """Samples that are near an earlier one are left out."""

    def forward(self, x):
        near = torch.tril(torch.cdist(x, x) < 0.5, -1).any(1)
        return super().forward(x) * ~near[:, None]


class Largest(nn.Linear):
    """The largest output of the batch is cut."""

    def forward(self, x):
        out = super().forward(x)
        return out.clamp(max=out.detach().max() - 1e-3)


def routed(*more_than_places: int):
    """Batches of which these many samples go to the first expert."""
    batches = []
    for count in more_than_places:
        x = torch.randn(SAMPLES, 5).double()
        x[:, 0] = 0
        x[torch.randperm(SAMPLES)[:count], 0] = 9
        batches.append((x, labels(SAMPLES)))
    return batches


@pytest.mark.parametrize("model", [ByRows, ByMask])
@pytest.mark.parametrize("sums", [diagonal, absolute])
def test_experts_that_few_samples_find_full(model, sums):
    torch.manual_seed(0)
    experts = model(PLACES).double()
    experts.gate.weight.data[:, 0] = torch.tensor([3.0, -3.0, -3.0])
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        sums(experts, routed(20, PLACES + 1, 20))


@pytest.mark.parametrize("model", [ByRows, ByMask])
def test_experts_with_places_enough(model):
    torch.manual_seed(0)
    check(model(SAMPLES), routed(20, 20))


def test_near_pairs_are_left_out():
    torch.manual_seed(0)
    batches = routed(20, 20, 20)
    for x, _ in batches:
        x[40] = x[7]
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(Pairs(5, K).double(), batches)


def test_the_largest_of_a_batch():
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(Largest(5, K).double(), [(torch.randn(SAMPLES, 5).double(), labels(SAMPLES)) for _ in range(2)])


class Sequences(nn.Module):
    """Positions first: reductions over their dimension are no coupling, nor is a mask of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x):
        x = torch.tanh(self.layer(x.transpose(0, 1)))
        if (x == 0).all():
            return self.head(x[0])
        return self.head((x.cumsum(0) * x.softmax(0)).mean(0))


def test_reductions_over_positions_are_none_over_samples():
    model, x = Sequences().double(), torch.randn(SAMPLES, 4, 5).double()
    batch = x, labels(SAMPLES)
    plans = [survey(made, dict(made.named_parameters()), batch, Objective()).mixes for made in (model, Pooling().double())]
    assert plans == [False, True]
    check(model, [batch])


class Masked(nn.Module):
    """An expert takes the first samples that want it, as many as it has places; the logit of one class is far down."""

    def __init__(self, places: int, far: float, added: bool) -> None:
        super().__init__()
        self.places, self.far, self.added, self.expert, self.head = places, far, added, nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        sent = x[:, 0] > 1
        sent = sent & (sent.cumsum(0) <= self.places)
        z, last = self.head(torch.where(sent[:, None], torch.tanh(self.expert(x)), x)), torch.arange(K) == K - 1
        return z + torch.zeros(K).to(z).masked_fill(last, self.far) if self.added else z.masked_fill(last, self.far)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("far", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_masked_classes_do_not_hide_a_coupling(far, added, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(64, 5).clamp(-2, 0.9).to(dtype), torch.randint(0, K - 1, (64,))
    x[[5, 20, 30, 50, 60], 0] = 1.5
    for kind in ("empirical", "expected"):
        with pytest.raises(ModelError, match="changes with the rest of its batch"):
            diagonal(Masked(3, far, added).to(dtype), [(x, y)], kind=kind)
    check(Masked(64, far, added), [(x.double(), y)])


class Pooling(Sequences):
    def forward(self, x):
        return super().forward(x - 0 * x.mean((0, 1)))
