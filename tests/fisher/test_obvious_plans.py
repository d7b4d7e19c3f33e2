"""A model whose parameters each have one closed form that fits needs no survey: the first batch shows whether it holds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from expunge.fisher import adders, diagonal
from expunge.fisher.closed_forms import rules, tables
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.closed_forms.uses import Use
from expunge.fisher.queueing import QueuedConfirmation
from tests import reference
from tests.fisher.cases import MODELS, build
from tests.fisher.patterns import K, check, labels


@pytest.fixture
def made(monkeypatch):
    """How the plans of all calls were made, in turn: "obvious", "none" where there is no such plan, "survey"."""
    found, obvious, survey = [], adders.obvious_plan, adders.survey

    def recorded(*given):
        plan = obvious(*given)
        found.append("none" if plan is None else "obvious")
        return plan

    monkeypatch.setattr(adders, "obvious_plan", recorded)
    monkeypatch.setattr(adders, "survey", lambda *given: found.append("survey") or survey(*given))
    return found


class Tokens(nn.Module):
    """A table, a position that all samples share, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place, self.norm, self.head = (
            nn.Embedding(7, 5),
            nn.Parameter(torch.randn(1, 3, 5)),
            nn.LayerNorm(5),
            nn.Linear(5, K),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.table(x) + self.place)).mean(1))


def images():
    return torch.randn(9, 3, 5, 5).double(), labels(9)


def tokens():
    return torch.randint(0, 7, (9, 3)), labels(9)


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, K))
    model[1].running_mean.normal_()
    return model


@pytest.mark.parametrize(("make", "data"), [(convolutions, images), (Tokens, tokens)])
def test_ordinary_models_are_not_surveyed(make, data, made):
    torch.manual_seed(0)
    check(make(), [data(), data(), data()])
    assert made == ["obvious"]


def larger(*places):
    """A function that gets these arguments a little too large."""

    def change(function):
        def changed(*given):
            return function(*(value * 1.1 if number in places else value for number, value in enumerate(given)))

        return changed

    return change


FAULTS = {  # of the sums that parameters get; the drawn samples' own rows are right
    "biases and the weights of a batch norm": (convolutions, images, Use, "add_rows", larger(2)),
    "a shared position and the weights of a layer norm": (Tokens, tokens, Use, "add", larger(2)),
    "a table": (Tokens, tokens, tables, "looked_up", larger(1)),
    "a linear map": (Tokens, tokens, rules, "squared_products", larger(1)),
}


@pytest.mark.parametrize("once", [False, True], ids=["all", "one of each form, as on a GPU"])
@pytest.mark.parametrize("fault", FAULTS)
def test_sums_that_are_not_those_of_the_rows_are_surveyed(fault, once, made, monkeypatch):
    make, data, place, name, change = FAULTS[fault]
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    if once:
        monkeypatch.setattr("expunge.fisher.confirming.Audit", lambda pick, name=None: Audit(pick, once=True))
    torch.manual_seed(0)
    check(make(), [data(), data(), data()])  # the survey's own check gives these parameters to other ways
    assert made == ["obvious", "survey"]


class Alike(nn.Module):
    """Two maps of one form, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, K))

    def forward(self, x):
        return self.layers(x)


def test_once_audits_one_parameter_of_each_form(monkeypatch):
    audits = []

    class Kept(Audit):
        def __init__(self, *given, **settings):
            super().__init__(*given, **settings)
            audits.append(self)

    monkeypatch.setattr("expunge.fisher.confirming.Audit", Kept)
    monkeypatch.setattr(adders, "_confirmation", lambda place, *given: _queued(*given))
    torch.manual_seed(0)
    diagonal(Alike().eval(), [(torch.randn(32, 5), labels(32)) for _ in range(3)])
    assert [{*audit.squares} for audit in audits] == [{"layers.2.weight", "layers.2.bias", "layers.4.weight", "layers.4.bias"}]


def _queued(*given):
    confirmation = QueuedConfirmation(*given)
    confirmation._on_cuda = True
    return confirmation


def test_a_first_batch_without_gradients_shows_nothing(made):
    """The last layer is zero, and the loss of the first batch knows none of it."""
    torch.manual_seed(0)
    model = convolutions()
    x, y = images()
    nothing = torch.zeros_like(x)
    with torch.no_grad():
        for parameter in model[:2].parameters():
            parameter.zero_()
        model[-1].weight.zero_()
        model[-1].bias.copy_(torch.tensor([900.0] + [-900.0] * (K - 1)))
    batches = [(nothing, torch.zeros_like(y)), (x, y)]
    check(model, batches)
    assert made == ["obvious", "survey"]


class Shy(nn.Linear):
    """Fails where its own weight is not what it is called with."""

    def forward(self, x):
        out = super().forward(x)
        if out.grad_fn is not None and "Linear" in type(out.grad_fn).__name__ and len(x) > 2:
            raise RuntimeError("not with these")
        return out


def test_a_pass_that_fails_is_surveyed(made):
    torch.manual_seed(0)
    check(nn.Sequential(Shy(5, 6), nn.Tanh(), nn.Linear(6, K)), [(torch.randn(9, 5).double(), labels(9)) for _ in range(2)])
    assert made == ["obvious", "survey"]


class Later(nn.Module):
    """Uses a layer in another way for long samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        x = self.inner(x) if x.shape[1] < 6 else x @ self.inner.weight.exp() + self.inner.bias
        return self.head(torch.tanh(x)).mean(1)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_batches_of_which_one_uses_a_layer_in_another_way(place, made):
    torch.manual_seed(0)
    check(Later(), [(torch.randn(9, 7 if number == place else 4, 5).double(), labels(9)) for number in range(4)])
    assert made[0] == ("none" if place == 0 else "obvious")


@pytest.mark.parametrize("name", [*MODELS][::3])
def test_with_and_without_a_survey_the_sums_are_the_same(name, monkeypatch):
    model, batch = build(name)
    obvious = diagonal(copy.deepcopy(model), [batch, batch]).sums
    monkeypatch.setattr(adders, "obvious_plan", lambda *given: None)
    for key, value in diagonal(model, [batch, batch]).sums.items():
        torch.testing.assert_close(obvious[key], value, rtol=1e-9, atol=1e-12 * float(value.max()))


class Windows(nn.Module):
    """Attention within windows, whose rows are folded into those of the samples, with a table of relative positions; `outer`: in which
    order."""

    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.outer, self.table = outer, nn.Parameter(torch.randn(5))
        self.query, self.value, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, K)

    def forward(self, x):
        rows = x.unflatten(1, (2, 3)) if self.outer else x.unflatten(1, (2, 3)).transpose(0, 1)
        rows = rows.flatten(0, 1)
        places = torch.arange(3)
        scores = self.query(rows) @ rows.transpose(1, 2) + self.table[places[:, None] - places + 2][None]
        rows = (scores.softmax(-1) @ self.value(rows)).mean(1)
        return self.head(rows.unflatten(0, (-1, 2) if self.outer else (2, -1)).mean(1 if self.outer else 0))


@pytest.mark.parametrize("outer", [True, False])
def test_of_two_orders_of_rows_the_first_sample_shows_which(outer, made):
    torch.manual_seed(0)
    check(Windows(outer), [(torch.randn(9, 6, 6).double(), labels(9)) for _ in range(2)])
    assert made == ["obvious"]


def test_where_all_rows_are_alike_a_survey_is_made(made):
    torch.manual_seed(0)
    blank = torch.randn(1, 1, 6).double().expand(9, 6, -1)
    check(Windows(False), [(blank, labels(9)), (torch.randn(9, 6, 6).double(), labels(9))])
    assert made == ["none", "survey"]


class Shifted(nn.Module):
    """A faint shift, (1, C), that is used without its first dimension: it is no row of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.middle, self.head = nn.Parameter(torch.randn(1, 6)), nn.Linear(6, 6), nn.Linear(6, K)

    def forward(self, x):
        return self.head(x + 1e-6 * torch.tanh(self.middle(x) + self.shift[0]))


class Unlikely(nn.Module):
    """The same in the branch of a class with a probability of 1e-14."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.layer, self.last = nn.Linear(6, K - 1), nn.Linear(6, 6), nn.Linear(6, 1)
        self.shift = nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        return torch.cat([self.plain(x), self.last(torch.tanh(self.layer(x) + self.shift.mean(0))) - 32], 1)


class Scaled(nn.Module):
    """Attention, whose last map has the rows of one token after those of another, under a LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, K)
        self.gamma = nn.Parameter(torch.full((6,), 1e-5))

    def forward(self, x):
        return self.head((x + self.gamma * self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Gated(nn.Module):
    """Attention behind a gate that is all but shut for most samples."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.plain, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 6), nn.Linear(6, K)

    def forward(self, x):
        gate = torch.sigmoid(20 * x[:, 0, 0])[:, None, None]
        return self.head(torch.tanh((1 - gate) * self.plain(x) + gate * self.attention(x, x, x)[0]).mean(1))


class Folded(nn.Module):
    """Rows of one token after those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, K)

    def forward(self, x):
        rows = self.layer(x.transpose(0, 1).reshape(-1, 6))
        return self.head(torch.tanh(rows).view(x.shape[1], x.shape[0], 6).mean(0))


def of_class(rare):
    targets = torch.randint(0, K - 1, (256,))
    targets[rare] = K - 1
    return targets


def opened(rare):
    x = torch.randn(256, 4, 6)
    x[:, 0, 0] = -1
    x[rare, 0, 0] = 1
    return x


def nearly_all_alike(rare):
    x = torch.full((256, 4, 6), 0.3)
    x[rare] = torch.randn(len(rare), 4, 6)
    return x


RARE = [100, 170, 230]
FAINT = {
    "a shift under a factor of 1e-6": (Shifted, lambda: (torch.randn(256, 6), of_class([])), torch.float32),
    "a class that nearly never comes": (Unlikely, lambda: (torch.randn(256, 6), of_class(RARE)), torch.float64),
    "a LayerScale of 1e-5": (Scaled, lambda: (torch.randn(256, 4, 6), of_class([])), torch.float32),
    "a gate of 2e-9": (Gated, lambda: (opened(RARE), of_class([])), torch.float32),
    "samples that are alike": (Folded, lambda: (nearly_all_alike([0, *RARE]), of_class([1, *RARE])), torch.float64),
}


@pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning")
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "as on a GPU"])
@pytest.mark.parametrize("blank", [False, True], ids=["", "after two blank samples"])
@pytest.mark.parametrize("size", [8, 64, 200])
@pytest.mark.parametrize("name", FAINT)
def test_what_a_first_batch_hardly_shows(name, size, blank, cuda, monkeypatch):
    """A gradient that is rounding beside the others confirms nothing; nor do blank samples in a survey."""
    make, data, dtype = FAINT[name]
    if cuda:
        monkeypatch.setattr(adders, "_confirmation", lambda place, *given: _queued(*given))
    for seed in range(3):
        torch.manual_seed(seed)
        model, (x, y) = make().to(dtype).eval(), data()
        if blank:
            x[:2] = 0
        batches = list(zip(x.to(dtype).split(size), y.split(size), strict=True))
        found = diagonal(model, batches, seed=seed).sums
        expected = reference.fisher(copy.deepcopy(model).double(), (x.double(), y))
        assert reference.worst_error(found, expected) <= (1e-9 if dtype == torch.float64 else 1e-3)
