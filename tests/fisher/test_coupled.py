"""Models and losses that treat a sample by its batch, by chance or by what was before are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import diagonal
from tests.fisher.patterns import (
    Centred,
    Dropping,
    K,
    Moving,
    Normalised,
    Path,
    Scaled,
    check,
    class_weighted,
    contrastive,
    labels,
    noisy,
    standardised,
    token_mean,
    vectors,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


@pytest.mark.parametrize("model", [Centred, Scaled, Normalised, Dropping, Path])
@pytest.mark.parametrize("first", ["copies", "zeros", "any"])
def test_samples_that_depend_on_their_batch(model, first):
    torch.manual_seed(0)
    x = torch.randn(12, 5).double()
    if first == "copies":
        x[1:4] = x[:1] + 1e-9 * torch.randn(3, 5)
    elif first == "zeros":
        x[:4] = 0
    for cuts in ([12], [4, 8], [2, 2, 8], *([[1] * 12] if model in (Dropping, Path) else [])):
        alone = "Expected more than 1 value per channel when training"  # torch's own words about one sample
        with pytest.raises((ModelError, InputError), match=f"changes with the rest of its batch, or from call to call|{alone}"):
            diagonal(model(5, K).double(), list(zip(x.split(cuts), labels(12).split(cuts), strict=True)))


class ByTheLargest(nn.Linear):
    """Divided by the largest entry of the batch: only what is smaller than others' is another one alone."""

    def forward(self, x):
        out = super().forward(x)
        return out / out.detach().abs().max()


@pytest.mark.parametrize("place", range(5))
def test_a_coupling_that_one_sample_alone_shows(place):
    torch.manual_seed(0)
    x = torch.full((5, 5), 3.0).double()
    x[place] = torch.randn(5) / 10
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(ByTheLargest(5, K).double(), [(x, labels(5))])


class AtTheEnd(nn.Linear):
    """Only the last sample of a batch sees another one: one in 64 is hardly drawn."""

    def forward(self, x):
        out = super().forward(x)
        return torch.cat([out[:-1], out[-1:] + 0.5 * out[:1]]) if len(x) > 2 else out


def test_a_coupling_at_the_end_of_a_large_batch():
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(AtTheEnd(5, K).double(), [(torch.randn(64, 5).double(), labels(64)) for _ in range(2)])


class Remembering(nn.Linear):
    """What was before is kept in a plain attribute: `how` says what of it."""

    def __init__(self, how: str) -> None:
        super().__init__(5, K)
        self.how, self.calls, self.kept = how, 0, {}

    def forward(self, x):
        self.calls += 1
        if self.how == "calls":
            return super().forward(x) * (1.5 if self.calls % 5 == 0 else 1)
        before = self.kept.setdefault(x.shape if self.how == "shape" else "last", x.detach().mean())
        self.kept["last"] = x.detach().mean()
        return super().forward(x + before)


@pytest.mark.parametrize("how", ["calls", "shape", "last"])
def test_what_was_before_in_a_plain_attribute(how):
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="changes with the rest of its batch, or from call to call"):
        diagonal(Remembering(how).double(), [vectors(), vectors()])


@pytest.mark.parametrize("kind", ["empirical", "expected"])
def test_a_counter_of_calls_in_large_batches(kind):
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="changes with the rest of its batch, or from call to call"):
        diagonal(Remembering("calls").double(), [vectors(samples=64) for _ in range(3)], kind=kind)


class Drawing(nn.Linear):
    """Draws random numbers without a use for them, as skipped layers do that are skipped in train mode alone."""

    def forward(self, x):
        return super().forward(x) if self.training and torch.rand([]) < 0.5 else super().forward(x + 0 * torch.rand([]))


def test_random_numbers_that_change_nothing():
    check(Drawing(5, K), [vectors(), vectors()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("speed", [0.1, 1e-3])
def test_buffers_that_move(speed, dtype):
    model = Moving(5, K, speed=speed).to(dtype)
    with pytest.raises(ModelError, match="from call to call"):
        diagonal(model, [(torch.randn(6, 5, dtype=dtype), labels(6))] * 3)
    assert float(model.level) == 1


class Stepping(nn.Linear):
    """Signs with straight-through gradients: outputs stay, gradients move with the buffer."""

    def __init__(self) -> None:
        super().__init__(5, K)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x):
        self.level += 1
        out = super().forward(x) * self.level
        return out + (out.sign() - out).detach()


def test_buffers_that_move_gradients_alone():
    with pytest.raises(ModelError, match="from call to call"):
        diagonal(Stepping().double(), [vectors(), vectors()])


@pytest.mark.parametrize("losses", [class_weighted, contrastive, standardised, noisy])
@pytest.mark.parametrize("sizes", [[8], [2, 6], [4, 4]])
def test_losses_that_depend_on_the_batch(losses, sizes):
    torch.manual_seed(0)
    x, y = torch.randn(8, 5).double(), torch.tensor([0, 0, 1, 2, 0, 3, 3, 1])
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        diagonal(nn.Linear(5, K).double(), list(zip(x.split(sizes), y.split(sizes), strict=True)), objective=Objective(losses=losses))


def by_the_last_of_the_rare(logits, targets):
    """Samples of label 3 are weighted by the last of them."""
    losses, rare = F.cross_entropy(logits, targets, reduction="none"), targets == 3
    return torch.where(rare, losses * losses.detach()[rare][-1], losses) if rare.sum() > 1 else losses


@pytest.mark.parametrize("place", [6, 10, 14])
def test_losses_that_couple_two_samples_of_even_numbers(place):
    """A batch without every second sample would still hold both: which samples go without the others must be drawn."""
    torch.manual_seed(0)
    y = torch.arange(64) % 3
    y[[place, place + 22]] = 3
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        batches = [(torch.randn(64, 5).double(), y) for _ in range(6)]
        diagonal(nn.Linear(5, K).double(), batches, objective=Objective(losses=by_the_last_of_the_rare))


def of_the_largest(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return torch.where(losses > 4, losses / losses.detach().max(), losses)


def harder_half(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses * (losses >= losses.detach().median())


@pytest.mark.parametrize("losses", [of_the_largest, harder_half])
def test_losses_that_depend_on_the_batch_for_few_samples(losses):
    torch.manual_seed(0)
    batches = [(2 * torch.randn(64, 5).double(), labels(64)) for _ in range(2)]
    model = nn.Linear(5, K).double()
    if losses is of_the_largest:
        assert 2 <= sum(int((F.cross_entropy(model(x), y, reduction="none") > 4).sum()) for x, y in batches) <= 16
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        diagonal(model, batches, objective=Objective(losses=losses))


def test_losses_divided_by_the_tokens_of_the_batch():
    x, y = torch.randn(6, 5, 7).double(), torch.randint(0, K, (6, 7))
    for sample, length in enumerate((7, 7, 3, 2, 5, 1)):
        y[sample, length:] = -100
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        diagonal(nn.Conv1d(5, K, 1).double(), [(x, y)], objective=Objective(losses=token_mean))
