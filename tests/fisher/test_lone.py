"""What most groups of samples have and one alone may lack (a text of full length), and what shows in later batches alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import absolute, diagonal
from tests.reference import worst_error

CLASSES = 4


class Trimmed(nn.Module):
    """The mean over the tokens that the longest text of the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x, lengths):
        return self.head(torch.tanh(self.layer(x[:, : int(lengths.max())])).mean(1))


class EarlyExit(nn.Module):
    """Another head where not all are sure; half of the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.deeper = nn.Linear(5, 6), nn.Linear(6, 6)
        self.first, self.second = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x, lengths):
        out = torch.tanh(self.layer(x[:, 0]))
        sure = (lengths > 5).all()
        return self.first(out) if sure else self.second(torch.tanh(self.deeper(out)))


class Scaled(EarlyExit):
    """Asks nobody: the yes or no is a factor."""

    def forward(self, x, lengths):
        return self.first(torch.tanh(self.layer(x[:, 0])) * (1 + (lengths < 6).any()))


def texts(samples: int) -> tuple[torch.Tensor, ...]:
    lengths = torch.where(torch.rand(samples) < 0.6, 6, torch.randint(2, 6, (samples,)))
    x = torch.randn(samples, 6, 5).double() * (torch.arange(6) < lengths[:, None])[..., None]
    return x, lengths, torch.randint(CLASSES, (samples,))


@pytest.mark.parametrize("make", [Trimmed, EarlyExit, Scaled])
@pytest.mark.parametrize("sizes", [(33,), (128,), (64, 64)])
def test_a_yes_or_no_about_the_batch_is_found(make, sizes):
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(ModelError, match="changes with the rest of its batch"):
            diagonal(make().double().eval(), [texts(size) for size in sizes])


def test_a_loss_that_knows_the_longest_of_the_batch_is_refused():
    def losses(logits, targets):
        return F.cross_entropy(logits, targets, reduction="none") * (1 + (targets > 1).any())

    for seed in range(5):
        torch.manual_seed(seed)
        data = [(torch.randn(128, 5).double(), torch.randint(CLASSES, (128,)))]
        with pytest.raises(InputError, match="must give each sample its own loss"):
            diagonal(nn.Linear(5, CLASSES).double(), data, objective=Objective(losses=losses))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        out = torch.tanh(self.layer(x))
        if out.requires_grad:
            out.register_hook(lambda slope: slope * (0.5 if (slope.abs() > 0.2).any() else 1.0))
        return self.head(out)


def looped(model, batches) -> dict[str, torch.Tensor]:
    sums = {name: torch.zeros_like(value) for name, value in model.named_parameters() if value.requires_grad}
    for *inputs, labels in batches:
        for row in range(len(labels)):
            loss = F.cross_entropy(model(*(tensor[row : row + 1] for tensor in inputs)), labels[row : row + 1])
            found = torch.autograd.grad(loss, [value for value in model.parameters() if value.requires_grad])
            for total, gradient in zip(sums.values(), found, strict=True):
                total += gradient**2
    return sums


@pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning")
@pytest.mark.parametrize("samples", [4, 33])
def test_a_hook_that_asks_about_the_batch_is_not_followed(samples):
    for seed in range(4):
        torch.manual_seed(seed)
        model, batch = Hooked().double(), (torch.randn(samples, 5).double(), torch.randint(CLASSES, (samples,)))
        assert worst_error(diagonal(model, [batch]).sums, looped(model, [batch])) <= 1e-10


class Probe(nn.Module):
    """On a frozen encoder of torch's, whose fast path gives zeros as padding; the watched pass takes the other."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("sizes", [(33,), (64, 20)])
def test_a_frozen_encoder_with_few_padded_texts(sizes):
    for seed in range(3):
        torch.manual_seed(seed)
        model, batches = Probe().double().eval(), []
        for size in sizes:
            lengths = torch.where(torch.rand(size) < 0.1, torch.randint(2, 6, (size,)), 6)
            x, labels = torch.randn(size, 6, 8).double(), torch.randint(CLASSES, (size,))
            batches.append((x, torch.arange(6) >= lengths[:, None], labels))
        assert worst_error(diagonal(model, batches).sums, looped(model, batches)) <= 1e-10


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.centres = nn.Linear(5, CLASSES), nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.layer(x)


LOSSES = {
    "centres": lambda model, z, y: F.cross_entropy(z, y, reduction="none") + (z - model.centres[y]).square().sum(1),
    "temperature": lambda model, z, y: F.cross_entropy(z / model.temperature, y, reduction="none"),
    "layer.weight": lambda model, z, y: F.cross_entropy(z, y, reduction="none") + 0.1 * model.layer.weight.square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("samples", [1, 20])
@pytest.mark.parametrize("sums", [diagonal, absolute])
def test_losses_that_use_parameters_by_themselves_are_refused(name, samples, sums):
    model, batch = Centres().double(), (torch.randn(samples, 5).double(), torch.randint(CLASSES, (samples,)))
    objective = Objective(losses=lambda z, y: LOSSES[name](model, z, y))
    with pytest.raises(
        InputError, match=f"objective.losses: must depend on the model by its outputs alone; .*; found the parameter {name}"
    ):
        sums(model, [batch], objective=objective)


def test_a_foreign_parameter_in_losses_is_nobodys_business():
    foreign = nn.Parameter(torch.ones(CLASSES).double())
    model, batch = nn.Linear(5, CLASSES).double(), (torch.randn(20, 5).double(), torch.randint(CLASSES, (20,)))
    objective = Objective(losses=lambda z, y: F.cross_entropy(z * foreign, y, reduction="none"))
    assert worst_error(diagonal(model, [batch], objective=objective).sums, looped(model, [batch])) <= 1e-12


@torch.library.custom_op("expunge_tests::ordered", mutates_args=())
def ordered(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return x[(key > 5).to(torch.uint8).argsort(stable=True)].clone()


@torch.library.custom_op("expunge_tests::unordered", mutates_args=())
def unordered(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return x[(key > 5).to(torch.uint8).argsort(stable=True).argsort()].clone()


def _kept(ctx, inputs, output) -> None:
    ctx.key = inputs[1]


ordered.register_autograd(lambda ctx, slope: (unordered(slope, ctx.key), None), setup_context=_kept)
unordered.register_autograd(lambda ctx, slope: (ordered(slope, ctx.key), None), setup_context=_kept)


class OutOfSight(nn.Module):
    """Tokens that go to other places within an operation that cannot be watched, in later batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.moved, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        flat = x.flatten(0, 1)
        out = torch.tanh(self.layer(flat))
        out = unordered(torch.tanh(self.moved(ordered(out, flat[:, 0]))), flat[:, 0])
        return self.head(out.view(*x.shape[:2], 6).mean(1))


@pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning")
@pytest.mark.parametrize("sizes", [(64, 64), (20,) * 4, (64,) * 10])
def test_rows_that_move_out_of_sight_in_later_batches(sizes):
    for seed in range(2):
        torch.manual_seed(seed)
        model, batches = OutOfSight().double().eval(), []
        for number, size in enumerate(sizes):
            x = torch.randn(size, 4, 5).clamp(-2, 2).double()
            if number:
                x[..., 0] = torch.where(torch.rand(size, 4) < 0.3, 9.0, x[..., 0])
            batches.append((x, torch.randint(CLASSES, (size,))))
        assert worst_error(diagonal(model, batches).sums, looped(model, batches)) <= 1e-10


def test_mapping_batches_in_a_list_may_have_mappings_as_targets():
    model, batch = nn.Linear(5, 3).double(), {"image": torch.randn(4, 5).double(), "target": {"y": torch.randn(4, 3).double()}}
    objective = Objective(
        outputs=lambda model, batch: model(batch["image"]),
        targets=lambda batch: batch["target"],
        losses=lambda z, target: (z - target["y"]).square().sum(1),
        classes=False,
    )
    assert diagonal(model, [batch] * 2, objective=objective).count == 8


class ByTheLargest(nn.Module):
    """All samples of a batch take the branch if one of them asks for it; the one that does not is another alone."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor(0.5)), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(x * self.scale if float(x[:, 0].max()) > 1.0 else x)


@pytest.mark.parametrize("seed", range(6))
def test_one_of_a_small_batch_that_a_number_read_treats_as_the_others(seed):
    torch.manual_seed(seed)
    x = torch.randn(23, 5).double()
    x[:, 0] = 2.0
    x[18, 0] = 0.0  # of the second batch
    batches = [(part, torch.randint(0, CLASSES, (len(part),))) for part in (x[:16], x[16:])]
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(ByTheLargest().double(), batches, seed=seed)
