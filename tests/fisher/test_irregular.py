"""Models whose samples put different numbers of rows into an operation, or in an order of their own; and what else is not regular."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import diagonal
from expunge.fisher.borrowing import undisturbed
from expunge.fisher.planning.survey import survey
from tests import reference

K = 4


class Unpadded(nn.Module):
    """Only the tokens that are there go through the layer, and back to their places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, mask):
        out = x.new_zeros(*mask.shape, 6)
        out[mask] = torch.tanh(self.layer(self.rows(x, mask)))
        return self.head(out.sum(1))

    def rows(self, x, mask):
        return x[mask]


class Selected(Unpadded):
    def rows(self, x, mask):
        return torch.masked_select(x, mask[..., None]).view(-1, x.shape[-1])


class Numbered(Unpadded):
    def rows(self, x, mask):
        return x.flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(1))


class Listed(Unpadded):
    def rows(self, x, mask):
        return torch.cat([x[index, :length] for index, length in enumerate(mask.sum(1).tolist())])


class Sorted(nn.Module):
    """Tokens in the order of their values, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, mask):
        flat = x.flatten(0, 1)
        order = flat[:, 0].argsort()
        out = torch.zeros(len(flat), 6, dtype=x.dtype).index_copy(0, order, torch.tanh(self.layer(flat[order])))
        return self.head(out.view(len(x), -1, 6).sum(1))


class Experts(nn.Module):
    """Each token goes to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(5, 2), nn.Linear(5, K)
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x, mask):
        flat = x.flatten(0, 1)
        weight, choice = self.gate(flat).softmax(1).max(1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_copy(0, rows, expert(flat[rows]) * weight[rows, None])
        return self.head(out.view(x.shape).mean(1))


@pytest.mark.parametrize("lengths", [(3, 3, 2, 4), (3, 3, 1, 5, 2, 4), (2, 3, 3, 4), (2, 2, 2, 2, 5, 1)])
@pytest.mark.parametrize("model", [Unpadded, Selected, Numbered, Listed, Sorted, Experts])
def test_rows_chosen_by_content(model, lengths):
    for seed in range(3):
        torch.manual_seed(seed)
        x, mask = torch.randn(len(lengths), 6, 5).double(), torch.arange(6)[None] < torch.tensor(lengths)[:, None]
        if seed == 2:
            x[:2, :, 0] = torch.arange(12.0).view(2, 6) - 20  # the first two samples are in order
        batch, built = (x, mask, torch.randint(0, K, (len(lengths),))), model().double().eval()
        expected = reference.fisher(built, batch)
        assert reference.worst_error(diagonal(built, [batch]).sums, expected) <= 1e-10


def planned(model, batch):
    parameters = dict(model.named_parameters())
    with undisturbed(model, parameters):
        return survey(model, parameters, batch, Objective())


def test_heads_of_such_models_keep_their_closed_form():
    mask = torch.arange(6)[None] < torch.tensor([3, 3])[:, None]
    for built in (Unpadded(), Numbered(), Experts()):
        plan = planned(built, (torch.randn(2, 6, 5), mask, torch.zeros(2, dtype=torch.int64)))
        assert {"head.weight", "head.bias"} <= plan.layouts.keys()


class Pooled(nn.Module):
    """The last token of each, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, K)
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, tokens):
        x = torch.tanh(self.layer(self.table(tokens)))[:, self.order]
        return self.head(x[torch.arange(len(x)), tokens.argmax(1) % 3])


class Ends(nn.Module):
    """The first and the last of a sequence that runs along the first dimension, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(10, K)

    def forward(self, tokens):
        x = self.table(tokens).transpose(0, 1)
        return self.head(torch.cat([x[0], x[-1]], 1))


@pytest.mark.parametrize("model", [Pooled, Ends])
def test_what_leaves_rows_where_they_are_keeps_closed_forms(model):
    built = model().double().eval()
    batch = torch.randint(0, 9, (5, 3)), torch.randint(0, K, (5,))
    assert reference.worst_error(diagonal(built, [batch]).sums, reference.fisher(built, batch)) <= 1e-10
    assert planned(built, batch).layouts.keys() == dict(built.named_parameters()).keys()


class Frames(nn.Module):
    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.outer, self.layer, self.head = outer, nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x):
        samples, frames = x.shape[:2]
        rows = x if self.outer else x.transpose(0, 1)
        out = torch.tanh(self.layer(rows.flatten(0, 1))).unflatten(0, rows.shape[:2])
        return self.head((out if self.outer else out.transpose(0, 1)).mean(1))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("frames", [(1, 3), (3, 1), (2, 3, 1), (1, 1)])
def test_frames_folded_into_the_batch_may_be_one_at_first(outer, frames):
    built = Frames(outer).double().eval()
    batches = [(torch.randn(3, count, 5).double(), torch.randint(0, K, (3,))) for count in frames]
    expected = [reference.fisher(built, batch) for batch in batches]
    total = {name: sum(each[name] for each in expected) for name in expected[0]}
    assert reference.worst_error(diagonal(built, batches).sums, total) <= 1e-10


class Chunked(nn.Module):
    """A module called on parts of the batch: once as long as it is small."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, K)

    def forward(self, x):
        return self.head(torch.cat([self.layer(part).flatten(1)[:, :6] for part in x.split(4)]))


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 6), nn.LayerNorm(8), nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 2)), nn.BatchNorm1d(8)]
)
def test_a_module_called_in_parts(layer):
    built = Chunked(copy.deepcopy(layer)).double().eval()
    batch = torch.randn(9, 8).double(), torch.randint(0, K, (9,))
    assert reference.worst_error(diagonal(built, [batch]).sums, reference.fisher(built, batch)) <= 1e-10


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second, self.head = self.first, nn.Linear(6, K)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_a_module_of_two_names_is_left_as_it_was():
    built = Shared().double().eval()
    before, batch = built.first.weight, (torch.randn(5, 6).double(), torch.randint(0, K, (5,)))
    found = diagonal(built, [batch]).sums
    assert reference.worst_error(found, reference.fisher(built, batch)) <= 1e-10
    assert built.first.weight is before and isinstance(before, nn.Parameter) and built.second is built.first


def test_few_positions_in_half_precision_and_where_terms_cancel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Flatten(), nn.Linear(16, K)).eval()
    model[2].weight.data.mul_(0.001)
    for scale in (1, 300):
        batch = torch.randn(6, 8, 1, 1).half() * scale, torch.randint(0, K, (6,))
        found = diagonal(copy.deepcopy(model).half(), [batch]).sums["0.weight"]
        exact = reference.fisher(copy.deepcopy(model).half().double(), (batch[0].double(), batch[1]))["0.weight"]
        assert float((found - exact).norm() / exact.norm()) < 0.02

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Conv2d(4, 8, 1), nn.Linear(8, K)

        def forward(self, x):
            z = self.layer(x)
            return self.head((z - z.mean((2, 3), keepdim=True)).square().mean((2, 3)))

    model, batch = Centred().eval(), (torch.randn(6, 4, 2, 2) + 1000, torch.randint(0, K, (6,)))
    exact, loop = reference.fisher(model, batch), reference.fisher(model, batch, dtype=torch.float32)
    found = diagonal(model, [batch]).sums
    for name in exact:
        size = float(exact[name].norm())
        assert float((found[name] - exact[name]).norm()) / size <= 2 * float((loop[name] - exact[name]).norm()) / size + 1e-6, name


def test_sums_that_are_not_finite_are_refused():
    model = nn.Linear(5, K).eval()
    model.weight.data /= 1e20
    with pytest.raises(ModelError, match="squared gradients of weight must be finite.*range of float32"):
        diagonal(model, [(torch.randn(6, 5) * 1e20, torch.zeros(6, dtype=torch.int64))])
    model.weight.data *= 1e30
    for count in (1, 3):
        with pytest.raises(ModelError, match="finite"):
            diagonal(model, [(torch.full((count, 5), 3e38), torch.zeros(count, dtype=torch.int64))])


class Careless(nn.Module):
    """Changes its input, a buffer in place and one anew, and a table that is renormalised."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(6, 5, max_norm=0.5), nn.Linear(5, K)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("others", torch.zeros(()))

    def forward(self, x, tokens):
        self.calls += 1
        self.others = self.others + 1
        return self.layer(x.sub_(1.0) + self.table(tokens))


@pytest.mark.parametrize("count", [1, 4])
def test_what_a_model_changes_in_its_forward_pass_is_put_back(count):
    model = Careless().double().eval()
    with torch.no_grad():
        model.table.weight.mul_(10)
    x, tokens, y = torch.randn(count, 5).double(), torch.randint(0, 6, (count,)), torch.randint(0, K, (count,))
    before, state = x.clone(), copy.deepcopy(model.state_dict())
    sums = diagonal(model, [(x, tokens, y)])
    assert torch.equal(x, before) and sums.digest == diagonal(model, [(x, tokens, y)]).digest
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    probabilities = F.softmax(model(x.clone(), tokens), 1).detach()
    found = (probabilities - F.one_hot(y, K)).square().sum(0)
    assert torch.allclose(sums.sums["layer.bias"], found)


def test_the_callers_tensors_get_no_gradient():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(5, K), torch.ones(5, requires_grad=True)
            self.register_buffer("scale", torch.ones(5, requires_grad=True))

        def forward(self, x):
            return self.layer(x * self.scale * self.other)

    model, x, y = Holding().eval(), torch.randn(6, 5, requires_grad=True), torch.randint(0, K, (6,))
    plain = diagonal(model, [(x.detach(), y)]).sums["layer.weight"]
    assert torch.equal(diagonal(model, [(x, y)]).sums["layer.weight"], plain)
    assert torch.equal(diagonal(model, [(x * 1.0, y)]).sums["layer.weight"], plain)  # with a graph behind it
    assert x.grad is None and model.other.grad is None and model.scale.grad is None


def test_an_assert_in_a_model_is_not_the_end():
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.layer = nn.Parameter(torch.randn(1, 5)), nn.Linear(5, K)

        def forward(self, x):
            token = self.token * 2
            assert token.shape == (1, 5)
            return self.layer(x + token)

    model, batch = Strict().double().eval(), (torch.randn(4, 5).double(), torch.randint(0, K, (4,)))
    assert reference.worst_error(diagonal(model, [batch]).sums, reference.fisher(model, batch)) <= 1e-10


@pytest.mark.parametrize(
    "targets", [torch.rand(4, K), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1), torch.zeros(4, dtype=torch.bool)]
)
def test_the_models_own_distribution_needs_no_targets(targets):
    model, x = nn.Linear(5, K).eval(), torch.randn(4, 5)
    found = diagonal(model, [(x, targets)], kind="expected").sums["weight"]
    assert torch.equal(found, diagonal(model, [(x, torch.zeros(4, dtype=torch.int64))], kind="expected").sums["weight"])


@pytest.mark.parametrize("kind", ["expected", "sampled", "batch"])
def test_one_logit_has_no_distribution(kind):
    objective = Objective(
        losses=lambda logits, targets: F.binary_cross_entropy_with_logits(logits[:, 0], targets, reduction="none"), classes=True
    )
    with pytest.raises(InputError, match="kind: .*with K of at least 2"):
        diagonal(nn.Linear(5, 1).eval(), [(torch.randn(4, 5), torch.ones(4))], kind=kind, objective=objective)


def test_bad_arguments():
    model, data = nn.Linear(5, K).eval(), [(torch.randn(4, 5), torch.zeros(4, dtype=torch.int64))]
    for settings in ({"draws": 1.5}, {"draws": True}, {"seed": -1}, {"seed": 0.5}):
        with pytest.raises(InputError, match=f"{next(iter(settings))}: must be a whole number"):
            diagonal(model, data, kind="sampled", **settings)
    with torch.inference_mode():
        made = nn.Linear(5, K)
    for strange in (made, nn.Linear(5, K, dtype=torch.complex64)):
        with pytest.raises(ModelError, match="real, and not made under torch.inference_mode"):
            diagonal(strange.eval(), data)
