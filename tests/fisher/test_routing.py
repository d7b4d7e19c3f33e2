"""Models that send rows where their content says: experts, ragged and packed sequences, bags, loops of as many rounds as a sample needs.

Each equals the loop over samples in float64, or is refused with the reason.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from expunge.errors import ModelError
from expunge.fisher import absolute, diagonal
from tests import reference
from tests.fisher.patterns import K, check, labels

pytestmark = pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning", "ignore:The PyTorch API of nested tensors")
LENGTHS = ((4, 4, 2, 3, 1, 4), (3, 1, 4, 2, 2, 4))  # the first two samples are as long


class Experts(nn.Module):
    """Each token goes to the `top` experts its gate likes best; an expert takes `capacity` tokens, the first ones."""

    def __init__(self, top: int, capacity: int | None = None) -> None:
        super().__init__()
        self.gate, self.head, self.top, self.capacity = nn.Linear(5, 3), nn.Linear(5, K), top, capacity
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top, -1)
        weights, out = weights / weights.sum(-1, keepdim=True) if self.top > 1 else weights, torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (part[: self.capacity] for part in torch.where(chosen == number))
            if len(token):
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return self.head(out.view(x.shape).mean(1))


class SortedExperts(nn.Module):
    """Samples in the order of their experts, cut by bincount."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.head = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, K)

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        order = chosen.argsort(stable=True)
        parts = x[order].split(torch.bincount(chosen, minlength=3).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return self.head(torch.tanh(out[order.argsort()]))


class StackedExperts(nn.Module):
    """One weight for all experts, looked up by the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights, self.head = nn.Linear(5, 3), nn.Parameter(torch.randn(3, 5, 5) / 2), nn.Linear(5, K)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.bmm(x[:, None], self.weights[chosen])[:, 0]
        return self.head(torch.tanh(out) * scores.gather(1, chosen[:, None]))


def tokens():
    return [(torch.randn(6, 4, 5).double(), labels(6)) for _ in range(3)]


def rows():
    return [(torch.randn(9, 5).double(), labels(9)) for _ in range(3)]


EXPERTS = {
    "best two": lambda: (Experts(2), tokens()),
    "best one": lambda: (Experts(1), tokens()),
    "sorted": lambda: (SortedExperts(), rows()),
    "stacked": lambda: (StackedExperts(), rows()),
}


@pytest.mark.parametrize("kind", ["empirical", "expected"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name, kind):
    for seed in range(2):
        torch.manual_seed(seed)
        check(*EXPERTS[name](), kind)


@pytest.mark.parametrize("capacity", [4, 15])  # the second is reached by few batches
def test_experts_with_a_capacity_are_refused(capacity):
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(Experts(2, capacity).double(), tokens())


class Ragged(nn.Module):
    """A layer, each sample's sum over its positions by a subclass, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, lengths):
        return self.head(self.sums(x, lengths))


class Jagged(Ragged):
    def sums(self, x, lengths):
        nested = torch.nested.as_nested_tensor([row[:length] for row, length in zip(x, lengths.tolist(), strict=True)], layout=torch.jagged)
        return torch.nested.to_padded_tensor(torch.tanh(self.layer(nested)), 0.0).sum(1)


class Strided(Ragged):
    """A nested tensor without a shape, which cannot be watched."""

    def sums(self, x, lengths):
        nested = torch.nested.as_nested_tensor([row[:length] for row, length in zip(x, lengths.tolist(), strict=True)])
        return torch.tanh(torch.nested.to_padded_tensor(self.layer(nested), 0.0)).sum(1)


class PackedData(Ragged):
    """A layer on the data of a packed sequence: position by position, the longest samples first."""

    def sums(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out = torch.tanh(self.layer(packed.data))
        packed = PackedSequence(out, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return pad_packed_sequence(packed, batch_first=True)[0].sum(1)


class Recurrent(nn.Module):
    def __init__(self, kind: type, in_order: bool) -> None:
        super().__init__()
        self.cells, self.head, self.in_order = kind(5, 6, 2, batch_first=True, bidirectional=True), nn.Linear(12, K), in_order

    def forward(self, x, lengths):
        order = lengths.argsort(descending=True) if self.in_order else torch.arange(len(x))
        packed = pack_padded_sequence(x[order], lengths[order], batch_first=True, enforce_sorted=self.in_order)
        return self.head(pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0].sum(1)[order.argsort()])


class Bag(nn.Module):
    def __init__(self, mode: str, offsets: bool) -> None:
        super().__init__()
        self.bag, self.head, self.offsets = nn.EmbeddingBag(9, 6, mode=mode, padding_idx=None if offsets else 0), nn.Linear(6, K), offsets

    def forward(self, words, lengths):
        if not self.offsets:
            return self.head(torch.tanh(self.bag(words)))
        flat = torch.cat([row[:length] for row, length in zip(words, lengths.tolist(), strict=True)])
        return self.head(torch.tanh(self.bag(flat, lengths.cumsum(0) - lengths)))


RAGGED = {
    "jagged": Jagged,
    "nested without a shape": Strided,
    "packed data": PackedData,
    "LSTM, in order of length": lambda: Recurrent(nn.LSTM, True),
    "LSTM": lambda: Recurrent(nn.LSTM, False),
    "GRU, in order of length": lambda: Recurrent(nn.GRU, True),
    "GRU": lambda: Recurrent(nn.GRU, False),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_sequences(name):
    torch.manual_seed(0)
    check(RAGGED[name](), [(torch.randn(6, 4, 5).double(), torch.tensor(each), labels(6)) for each in LENGTHS])


def test_absolute_gradients_where_operations_cannot_be_watched():
    torch.manual_seed(0)
    model, batch = Strided().double().eval(), (torch.randn(6, 4, 5).double(), torch.tensor(LENGTHS[0]), labels(6))
    sums = absolute(model, [batch]).sums
    single = [absolute(model, [tuple(part[row : row + 1] for part in batch)]).sums for row in range(6)]
    assert reference.worst_error(sums, {name: sum(each[name] for each in single) for name in sums}) <= 1e-10


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode, offsets):
    torch.manual_seed(0)
    check(Bag(mode, offsets), [(torch.randint(0, 9, (6, 4)), torch.tensor(each), labels(6)) for each in LENGTHS])


class Rounds(nn.Module):
    """A layer that is called until a sample is small."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(5, 5), nn.Linear(5, K), how

    def forward(self, x):
        return self.head(getattr(self, self.how)(x))

    def step(self, x):
        return 0.5 * torch.tanh(self.layer(x))

    def together(self, x):  # as many rounds as the largest sample needs
        for _ in range(6):
            x = self.step(x) if float(x.detach().abs().max()) > 0.3 else x
        return x

    def one_by_one(self, x):
        return torch.cat([self.together(row[None]) for row in x])

    def masked(self, x):
        for _ in range(6):
            alive = x.detach().abs().amax(1, keepdim=True) > 0.3
            x = torch.where(alive, self.step(x), x)
            if not alive.any():
                break
        return x

    def fewer(self, x):
        left, out = torch.arange(len(x)), x
        for _ in range(6):
            left = left[out.detach()[left].abs().amax(1) > 0.3]
            if len(left):
                out = out.index_copy(0, left, self.step(out[left]))
        return out


@pytest.mark.parametrize("how", ["one_by_one", "masked", "fewer"])
def test_loops_of_as_many_rounds_as_a_sample_needs(how):
    for seed in range(3):
        torch.manual_seed(seed)
        check(Rounds(how), rows())


def test_loops_of_as_many_rounds_as_the_batch_needs_are_refused():
    torch.manual_seed(0)
    x = torch.randn(9, 5).double()
    x[:3] /= 100
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(Rounds("together").double(), [(x, labels(9))])
