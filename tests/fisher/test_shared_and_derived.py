"""Parameters with several uses, and tensors made of parameters alone, equal the definition; what has no closed form falls back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from expunge import fisher
from expunge.fisher.closed_forms.padding import Active
from tests import reference

SAMPLES, LENGTH, WIDTH = 6, 5, 4


class Words(nn.Module):
    """Token numbers in, three classes out, through one method of a subclass."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, WIDTH, padding_idx=0), nn.Linear(WIDTH, 3)
        self.extra()

    def forward(self, ids):
        return self.head(self.mixed(self.table(ids), ids).mean(1))


class Scaled(Words):
    def extra(self):
        self.scale = nn.Parameter(torch.tensor(0.3))

    def mixed(self, x, ids):
        return torch.tanh(x) * self.scale.exp()


class Biased(Words):
    """A relative position bias, looked up by a buffer, turned, and added to the scores of every layer."""

    def extra(self):
        self.bias = nn.Parameter(torch.randn(2 * LENGTH - 1, 2))
        self.register_buffer("places", (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).add(LENGTH - 1))

    def mixed(self, x, ids):
        bias = self.bias[self.places].permute(2, 0, 1)[None]
        for _ in range(2):
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            x = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)
        return x


class Placed(Biased):
    """The bias by another lookup."""

    def __init__(self, lookup):
        self.lookup = lookup
        super().__init__()

    def mixed(self, x, ids):
        bias = self.lookup(self.bias, self.places).permute(2, 0, 1)[None]
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)


class Windowed(Biased):
    """Windows folded into the samples' dimension, with a mask repeated for each sample."""

    def mixed(self, x, ids):
        folded = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
        mask = torch.zeros(2, 1, LENGTH, LENGTH).index_fill(3, torch.tensor([0]), -1.0).to(x)
        bias = self.bias[self.places].permute(2, 0, 1)[None] + mask.repeat(len(x), 1, 1, 1)
        heads = folded.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)
        return mixed.unflatten(0, (len(x), 2)).sum(1)


class Again(Words):
    """A layer and a norm called three times."""

    def extra(self):
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def mixed(self, x, ids):
        for _ in range(3):
            x = torch.tanh(self.norm(self.layer(x)))
        return x


class Tied(Words):
    """Scores of all words by the table itself, which also looks up the words backwards."""

    def extra(self):
        self.back = nn.Linear(9, WIDTH)

    def mixed(self, x, ids):
        return self.back(functional.linear(x + self.table(ids.flip(1)), self.table.weight))


class OneMatrix(Words):
    """A matrix used as it is and transposed."""

    def extra(self):
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def mixed(self, x, ids):
        return torch.tanh(functional.linear(torch.tanh(x @ self.matrix), self.matrix))


class Made(Words):
    """A weight made of another: it meets the data in a matrix product."""

    def extra(self):
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def mixed(self, x, ids):
        return functional.linear(x, self.matrix.exp() / self.matrix.exp().sum())


CLOSED = {"scaled": Scaled, "biased": Biased, "windowed": Windowed, "again": Again, "tied": Tied, "one matrix": OneMatrix}


def example(kind):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (SAMPLES, LENGTH), generator=generator)
    return kind().double(), (ids, torch.randint(3, (SAMPLES,), generator=generator))


@pytest.mark.parametrize("kind", ["empirical", "expected"])
@pytest.mark.parametrize("name", CLOSED)
def test_equal_the_definition_by_closed_forms(name, kind):
    model, batch = example(CLOSED[name])
    assert fisher.plan(model, batch).slow == 0, fisher.plan(model, batch)
    expected = reference.fisher(model, batch, kind)
    for sizes in ([6], [2, 4], [1, 5]):
        parts = list(zip(*(part.split(sizes) for part in batch), strict=True))
        assert reference.worst_error(fisher.diagonal(model, parts, kind=kind).sums, expected) <= 1e-10, sizes


@torch.library.custom_op("expunge_tests::opaque", mutates_args=())
def opaque(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return table[places]


@torch.library.custom_op("expunge_tests::opaque_backward", mutates_args=())
def opaque_backward(gradient: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    return gradient.new_zeros(count, gradient.shape[-1]).index_add_(0, places.flatten(), gradient.flatten(0, 1))


def _saved(ctx, inputs, output):
    ctx.places, ctx.count = inputs[1], len(inputs[0])


opaque.register_autograd(lambda ctx, gradient: (opaque_backward(gradient, ctx.places, ctx.count), None), setup_context=_saved)
LOOKUPS = {
    "index": lambda table, places: table[places],
    "negative": lambda table, places: table[places - len(table)],
    "pairs": lambda table, places: torch.stack([table[places, 0], table[places, 1]], -1),
    "select": lambda table, places: table.index_select(0, places.flatten()).view(*places.shape, -1),
    "gather": lambda table, places: table.gather(0, places.flatten()[:, None].expand(-1, 2)).view(*places.shape, -1),
    "along": lambda table, places: table.take_along_dim(places.flatten()[:, None], 0).view(*places.shape, -1),
    "summed": lambda table, places: table.exp().cumsum(0)[places],
    "without a batching rule": lambda table, places: opaque(table, places),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_any_kind_by_closed_forms(name):
    model, batch = example(lambda: Placed(LOOKUPS[name]))
    assert fisher.plan(model, batch).slow == 0, fisher.plan(model, batch)
    assert reference.worst_error(fisher.diagonal(model, [batch]).sums, reference.fisher(model, batch)) <= 1e-10


@pytest.mark.parametrize("name", ["index", "gather", "select"])
def test_lookups_are_differentiated_once_for_all_samples(name):
    def operations(samples):
        model, (ids, targets) = example(lambda: Placed(LOOKUPS[name]))
        ids, targets = ids.repeat(samples, 1), targets.repeat(samples)
        with torch.profiler.profile() as profile:
            fisher.diagonal(model, [(ids, targets)])
        kinds = ("_index_put_impl_", "index_add", "scatter_add")
        return sum(event.name.endswith(kinds) for event in profile.events())

    assert operations(8) <= operations(2) + 8


def test_a_weight_made_of_another_falls_back_and_says_so():
    model, batch = example(Made)
    plan = fisher.plan(model, batch)
    assert plan["matrix"].way in ("torch.func", "loop") and plan["matrix"].reason == "made into another weight"
    assert plan["head.weight"].way == "closed form"
    assert reference.worst_error(fisher.diagonal(model, [batch]).sums, reference.fisher(model, batch)) <= 1e-10


def test_rows_without_gradient_are_left_out_wherever_they_are():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(8, 20, 40, generator=generator)
    gradients[3] = 0
    gradients[:, 11:] = 0
    gradients[5, 2:4] = 0
    gradients[6, 0] = float("nan")
    active = Active.of(gradients)
    assert active.counts == [11, 11, 11, 0, 11, 9, 11, 11] and len(active.rows) == 75
    whole = active.put_back(active.taken(gradients), gradients.shape)
    assert torch.equal(whole.nan_to_num(7), gradients.nan_to_num(7))
    assert Active.of(torch.randn(8, 20, 40, generator=generator)) is None


class Late(nn.Module):
    """Where a sample's first number is large, a scale made of one parameter is multiplied by another that has a closed form of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        logits = self.head(torch.tanh(self.layer(x)) * self.scale.exp())
        late = x[:, :1].abs() > 3
        return logits + late * x * (self.scale * self.layer.bias) if late.any() else logits


def test_a_parameter_that_a_later_batch_multiplies_with_a_followed_one_keeps_its_gradient():
    torch.manual_seed(0)
    model, x, y = Late().double(), torch.rand(128, WIDTH).double(), torch.randint(0, WIDTH, (128,))
    x[100] = 5.0  # in the last batch, where few samples are drawn
    batches = list(zip(x.split(32), y.split(32), strict=True))
    assert reference.worst_error(fisher.diagonal(model, batches).sums, reference.fisher(model, (x, y))) <= 1e-10


class TwoAlignments(nn.Module):
    """A tensor made of a parameter meets data of two and of three dimensions, with as many rows."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        scale = self.scale.exp()
        return self.head(x * scale + (torch.stack([x, x.tanh(), x.sin()], 1) * scale).prod(1))


def test_a_tensor_made_of_a_parameter_meets_data_of_several_dimensions():
    torch.manual_seed(0)
    model, x, y = TwoAlignments().double(), torch.randn(6, WIDTH).double(), torch.randint(0, 3, (6,))
    assert "3 closed form" in repr(fisher.plan(model, (x, y)))
    assert reference.worst_error(fisher.diagonal(model, [(x, y)]).sums, reference.fisher(model, (x, y))) <= 1e-10


@pytest.mark.parametrize("kind", ["empirical", "expected"])
def test_embeddings_with_sparse_gradients(kind):
    torch.manual_seed(0)
    table = nn.Embedding(9, WIDTH, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(LENGTH * WIDTH, 3)).double()
    ids, y = torch.randint(0, 9, (SAMPLES, LENGTH)), torch.randint(0, 3, (SAMPLES,))
    dense = nn.Sequential(nn.Embedding.from_pretrained(table.weight.detach(), freeze=False), *model[1:])
    expected = reference.fisher(dense, (ids, y), kind)
    assert reference.worst_error(fisher.diagonal(model, [(ids, y)], kind=kind).sums, expected) <= 1e-10
    singles = [(ids[row : row + 1], y[row : row + 1]) for row in range(SAMPLES)]
    assert reference.worst_error(fisher.diagonal(model, singles, kind=kind).sums, expected) <= 1e-10


class Gated(nn.Module):
    """`logits(self, x, gate)`: the gate is open for the few samples whose first number is large; every pass computes all for all."""

    def __init__(self, logits):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.row, self.scale = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.logits = logits

    def forward(self, x):
        return self.logits(self, x, x[:, :1].abs() > 3)


def looked_up(table, x):
    return functional.embedding(torch.zeros(len(x), dtype=torch.int64), table)


def by_position(x, scale):
    """x · scale, on rows that are in the order of the positions."""
    return (x.t()[:, :, None].flatten(0, 1) * scale.sum()).view(WIDTH, -1).t()


def folded(x):
    """Two rows for each sample, in the order of the positions."""
    return torch.cat([x, x.square()])


def unfolded(rows):
    return rows.tanh().view(2, -1, WIDTH).sum(0)


@pytest.mark.parametrize(
    "logits",
    [
        lambda m, x, gate: gate * (m.layer.bias * x) + m.layer(x),
        lambda m, x, gate: gate * (m.norm.weight * x) + m.layer(m.norm(x)),
        lambda m, x, gate: gate * (x * m.row + functional.linear(x, m.row)) + m.layer(x),
        lambda m, x, gate: gate * (x * m.row) + x + looked_up(m.row, x),
        lambda m, x, gate: m.layer(x * m.scale.exp()) + gate * by_position(x, m.scale.exp()),
        lambda m, x, gate: m.layer(x) + gate * unfolded(m.layer(folded(x))),
        lambda m, x, gate: m.norm(x) + gate * unfolded(m.norm(folded(x))),
        lambda m, x, gate: m.layer(((x * m.scale.exp()).repeat_interleave(2, 0) * m.scale.exp())[::2]) + gate * x,
        lambda m, x, gate: (x.repeat_interleave(2, 0) * m.scale.exp())[::2] + gate * unfolded(folded(x) * m.scale.exp()),
        lambda m, x, gate: m.layer(x) + gate * m.layer(2 * x.roll(1, 0)).roll(-1, 0),
        lambda m, x, gate: m.layer(x) + gate * m.layer(2 * torch.flip(x, [0])).flip(0),
    ],
    ids=[
        "bias",
        "norm",
        "row and matrix",
        "row and table",
        "rows of two orders",
        "layer on folded rows",
        "norm on folded rows",
        "scale twice",
        "scale on two orders",
        "rolled",
        "flipped",
    ],
)
def test_a_second_use_that_counts_for_one_sample_in_a_hundred(logits):
    torch.manual_seed(0)
    model, x, y = Gated(logits).double(), torch.rand(128, WIDTH).double(), torch.randint(0, WIDTH, (128,))
    x[100] *= 9
    x[100, 0] = 5.0
    batches = list(zip(x.split(32), y.split(32), strict=True))
    assert reference.worst_error(fisher.diagonal(model, batches).sums, reference.fisher(model, (x, y))) <= 1e-10
