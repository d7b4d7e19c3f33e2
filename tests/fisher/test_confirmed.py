"""What the first samples of the data do not show: each case equals the loop over samples in float64, or is refused with the reason."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import diagonal
from tests import reference

K = 4
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


def labels(count: int) -> torch.Tensor:
    return torch.randint(0, K, (count,))


def looped(model: nn.Module, batches, kind: str = "empirical"):
    parts = [reference.fisher(model, batch, kind) for batch in batches]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def check(model: nn.Module, batches, kind: str = "empirical", like: nn.Module | None = None) -> None:
    """`like`: a model of the same weights to loop over, where it cannot be the same one."""
    model = model.double().eval()
    if like is not None:
        like.double().load_state_dict(model.state_dict())
    found = diagonal(model, batches, kind=kind)
    assert reference.worst_error(found.sums, looped(like or model, batches, kind)) <= 1e-10


def vectors(*large: int, samples: int = 9, width: int = 5):
    """One batch whose samples at these places are large, so that they take another branch."""
    x = torch.randn(samples, width).double().clamp(-2, 2)
    x[list(large), 0] = 100
    return x, labels(samples)


class Branch(nn.Module):
    """A layer that only large samples go through, in several spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.rare, self.head = how, nn.Linear(5, 5), nn.Linear(5, K)
        if how == "scripted":
            self.rare = torch.jit.script(nn.Linear(5, 5).double())

    def forward(self, x):
        return self.head(torch.stack([self.one(row) if bool(row[0] > 50) else row for row in x]))

    def one(self, row):
        row = row / 100
        if self.how == "1-D":
            return torch.tanh(F.linear(row, self.rare.weight, self.rare.bias))
        if self.how == "transposed":
            return torch.tanh(row @ self.rare.weight.T + self.rare.bias)
        if self.how == "einsum":
            return torch.tanh(torch.einsum("i,oi->o", row, self.rare.weight) + self.rare.bias)
        return torch.tanh(self.rare(row[None])[0])


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


class Video(nn.Module):
    """Frames folded into the batch frame by frame: black first samples do not show the order."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6, bias=bias), nn.Linear(6, K)

    def forward(self, x):
        out = torch.tanh(self.layer(x.transpose(0, 1).flatten(0, 1)))
        return self.head(out.unflatten(0, (-1, len(x))).mean(0))


@pytest.mark.parametrize("black", [2, 6, 8])
def test_black_first_frames(black):
    torch.manual_seed(black)
    x = torch.randn(16, 3, 5).double()
    x[:black] = 0
    for cuts in ([16], [8, 8], [2, 7, 7]):
        check(Video(), list(zip(x.split(cuts), labels(16).split(cuts), strict=True)))


class Gated(nn.Module):
    """A branch multiplied by a gate that is shut for the first samples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(5, K)

    def forward(self, x):
        return self.head(x[:, 0] + (x[:, 0, :1] > 0) * self.inner(x)[:, 0])


class Rolled(nn.Linear):
    """The rows go through the layer in the place of their neighbours: a coupling that the gate hides."""

    def forward(self, x):
        return super().forward(x.flip(0)).flip(0)


class Transposed(nn.Linear):
    def forward(self, x):
        flat = x.transpose(0, 1).flatten(0, 1)
        return super().forward(flat).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


@pytest.mark.parametrize("inner", [Rolled, Transposed, nn.Linear])
@pytest.mark.parametrize("shut", [2, 5, 9])
def test_gates_shut_for_the_first_samples(inner, shut):
    torch.manual_seed(shut)
    x = torch.randn(20, 3, 5).double()
    x[:, 0, 0] = x[:, 0, 0].abs() + 0.1
    x[:shut, 0, 0] *= -1
    for cuts in ([20], [10, 10], [2, 9, 9]):
        check(Gated(inner(5, 5)), list(zip(x.split(cuts), labels(20).split(cuts), strict=True)))


class Dispatched(nn.Module):
    """One-hot dispatch: each sample has a slot in the table of its expert, in the order of arrival."""

    def __init__(self, experts: int = 2, capacity: int | None = None) -> None:
        super().__init__()
        self.experts, self.head, self.capacity = nn.ModuleList(nn.Linear(5, 5) for _ in range(experts)), nn.Linear(5, K), capacity

    def forward(self, x):
        chosen = F.one_hot((x[:, 0] > 0).long(), len(self.experts)).to(x)
        place = (chosen.cumsum(0) - 1) * chosen
        slots = F.one_hot(place.sum(1).long(), len(x)).to(x)[:, : self.capacity]
        dispatch = chosen[:, :, None] * slots[:, None]
        inside = torch.einsum("nec,nd->ecd", dispatch, x)
        outside = torch.stack([torch.tanh(expert(rows)) for expert, rows in zip(self.experts, inside, strict=True)])
        return self.head(torch.einsum("nec,ecd->nd", dispatch, outside))


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


class Unpadded(nn.Module):
    """Tokens that are there go through the layer, and back, in several spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.head = how, nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, mask):
        lengths = mask.sum(1).tolist()
        if self.how == "cat":
            rows = torch.cat([sample[:length] for sample, length in zip(x, lengths, strict=True)])
        elif self.how == "masked_select":
            rows = x.masked_select(mask[..., None]).reshape(-1, 5)
        elif self.how == "list":
            rows = x.flatten(0, 1)[[n * x.shape[1] + t for n, length in enumerate(lengths) for t in range(length)]]
        elif self.how == "numpy":
            rows = x.flatten(0, 1)[numpy.flatnonzero(mask.numpy())]
        elif self.how == "loop":
            rows = torch.stack([x[n, t] for n, length in enumerate(lengths) for t in range(length)])
        else:
            rows = torch.from_numpy(x.detach().numpy()[mask.numpy()])
        parts = torch.tanh(self.layer(rows)).split(lengths)
        return self.head(torch.stack([part.sum(0) for part in parts]))


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


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Scaled(nn.Linear):
    """One quantisation scale per batch."""

    def forward(self, x):
        scale = x.detach().abs().amax().clamp(min=1e-3) / 7
        return super().forward((x / scale).round() * scale)


class Normalised(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, K)

    def forward(self, x):
        return self.head(F.batch_norm(x, None, None, self.norm.weight, self.norm.bias, training=True))


class Dropping(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.3))


class Path(nn.Linear):
    """Drop path, left on."""

    def forward(self, x):
        return super().forward(x) * (torch.rand(len(x), 1) > 0.2)


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


class Drawing(nn.Linear):
    """Draws random numbers without a use for them, as skipped layers do that are skipped in train mode alone."""

    def forward(self, x):
        return super().forward(x) if self.training and torch.rand([]) < 0.5 else super().forward(x + 0 * torch.rand([]))


def test_random_numbers_that_change_nothing():
    check(Drawing(5, K), [vectors(), vectors()])


class Moving(nn.Linear):
    """A buffer that moves with every call, and the output with it."""

    def __init__(self, *sizes: int, speed: float = 0.1) -> None:
        super().__init__(*sizes)
        self.speed = speed
        self.register_buffer("level", torch.ones(()))

    def forward(self, x):
        self.level += self.speed
        return super().forward(x * self.level)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("speed", [0.1, 1e-3])
def test_buffers_that_move(speed, dtype):
    model = Moving(5, K, speed=speed).to(dtype)
    with pytest.raises(ModelError, match="from call to call"):
        diagonal(model, [(torch.randn(6, 5, dtype=dtype), labels(6))] * 3)
    assert float(model.level) == 1


def token_mean(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    return losses.sum(1) / (targets != -100).sum()


def class_weighted(logits, targets):
    weights = 1 / torch.bincount(targets, minlength=K)
    return F.cross_entropy(logits, targets, weight=weights.to(logits), reduction="none")


def contrastive(logits, targets):
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)), reduction="none")


def standardised(logits, targets):
    return F.cross_entropy((logits - logits.mean(0)) / (logits.std(0, correction=0) + 1e-3), targets, reduction="none")


def noisy(logits, targets):
    return F.cross_entropy(logits + torch.randn_like(logits), targets, reduction="none")


@pytest.mark.parametrize("losses", [class_weighted, contrastive, standardised, noisy])
@pytest.mark.parametrize("sizes", [[8], [2, 6], [4, 4]])
def test_losses_that_depend_on_the_batch(losses, sizes):
    torch.manual_seed(0)
    x, y = torch.randn(8, 5).double(), torch.tensor([0, 0, 1, 2, 0, 3, 3, 1])
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        diagonal(nn.Linear(5, K).double(), list(zip(x.split(sizes), y.split(sizes), strict=True)), objective=Objective(losses=losses))


def test_losses_divided_by_the_tokens_of_the_batch():
    x, y = torch.randn(6, 5, 7).double(), torch.randint(0, K, (6, 7))
    for sample, length in enumerate((7, 7, 3, 2, 5, 1)):
        y[sample, length:] = -100
    with pytest.raises(InputError, match="objective.losses: must give each sample its own loss"):
        diagonal(nn.Conv1d(5, K, 1).double(), [(x, y)], objective=Objective(losses=token_mean))


class Listed(nn.Module):
    """Takes the lengths as a list of Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, lengths):
        rows = torch.tanh(self.layer(x))
        return self.head(torch.stack([row[:length].mean(0) for row, length in zip(rows, lengths, strict=True)]))


@pytest.mark.parametrize("form", [list, numpy.array])
def test_list_valued_entries(form):
    model, x, y, lengths = Listed().double(), torch.randn(6, 4, 5).double(), labels(6), [4, 4, 1, 3, 2, 4]
    expected = None
    for n in range(6):
        part = reference.fisher(Fixed(model, [lengths[n]]), (x[n : n + 1], y[n : n + 1]))
        expected = part if expected is None else {name: expected[name] + part[name] for name in part}
    outputs = Objective(outputs=lambda model, batch: model(batch["x"], batch["lengths"]), targets=lambda batch: batch["labels"])
    found = diagonal(model, [{"x": x, "lengths": form(lengths), "labels": y}], objective=outputs).sums
    assert reference.worst_error({f"model.{name}": value for name, value in found.items()}, expected) <= 1e-10


class Fixed(nn.Module):
    def __init__(self, model, lengths) -> None:
        super().__init__()
        self.model, self.lengths = model, lengths

    def forward(self, x):
        return self.model(x, self.lengths)


class Encoder(nn.Module):
    """Frozen torch layers: their fast path puts zeros where tokens are padded, the slow one does not."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, K)
        self.encoder.requires_grad_(False)

    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("lengths", [(5, 5, 2, 4, 1, 5), (3, 1, 5, 2, 2, 4)])
def test_frozen_encoder_with_a_padding_mask(lengths):
    torch.manual_seed(0)
    model = Encoder().double().eval()
    x, y = torch.randn(6, 5, 8).double(), labels(6)
    mask = torch.arange(5)[None] >= torch.tensor(lengths)[:, None]
    expected = {}
    for n in range(6):
        logits = model(x[n : n + 1], mask[n : n + 1])
        for name in ("head.weight", "head.bias"):
            gradient = torch.autograd.grad(F.cross_entropy(logits, y[n : n + 1]), model.get_parameter(name), retain_graph=True)[0]
            expected[name] = expected.get(name, 0) + gradient**2
    assert reference.worst_error(diagonal(model, [(x, mask, y)]).sums, expected) <= 1e-10


class Written(nn.Module):
    """Writes through a view of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Linear(4, K)

    def forward(self, x):
        out = self.first(x)
        out.view(len(out), -1)[:, ::3] *= 2
        return self.head(torch.tanh(self.second(out)).mean((2, 3)))


def test_writes_through_a_view():
    torch.manual_seed(0)
    check(Written(), [(torch.randn(7, 2, 5, 5).double(), labels(7)), (torch.randn(7, 2, 5, 5).double(), labels(7))])


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(10, K)

    def forward(self, x):
        return self.head(torch.repeat_interleave(torch.tanh(self.layer(x)), repeats=2, dim=1))


class Energy(nn.Module):
    """Differentiates inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6), nn.Linear(5, K)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(self.layer(x)).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(force)


@pytest.mark.parametrize("model", [Repeated, Energy])
def test_what_crashed_runs(model):
    torch.manual_seed(0)
    check(model(), [vectors(), vectors(samples=3), vectors(samples=1)])


def test_a_batch_of_one_with_a_foreign_tensor_that_requires_grad():
    class Holding(nn.Linear):
        other = torch.ones(5, dtype=torch.float64, requires_grad=True)

        def forward(self, x):
            return super().forward(x * self.other)

    model, x, y = Holding(5, K).double(), torch.randn(3, 5).double(), labels(3)
    single = diagonal(model, [(x[n : n + 1], y[n : n + 1]) for n in range(3)]).sums
    assert reference.worst_error(single, diagonal(model, [(x, y)]).sums) <= 1e-12
    assert Holding.other.grad is None


@pytest.mark.parametrize("channels", [1, 6])
def test_prelu_behind_zeros(channels):
    """torch.func mixes up the samples of gradients behind a PReLU, but not those of zeros."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.slope, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.PReLU(channels), nn.Linear(6, K)

        def forward(self, x):
            x = F.conv2d(x, self.layer.weight.flip(-1), None, padding=1)
            return self.head((x + self.slope(x)).amax((2, 3)))

    torch.manual_seed(0)
    x = torch.randn(12, 6, 4, 3).double()
    x[:3] = 0
    for cuts in ([2, 2, 8], [12], [3, 9]):
        check(Gate(), list(zip(x.split(cuts), labels(12).split(cuts), strict=True)))


class Turning(nn.Module):
    """Without a closed form, and from the second batch on with a branch that torch.func cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head, self.calls = nn.Parameter(torch.randn(5)), nn.Linear(5, K), 0

    def forward(self, x):
        scale = torch.exp(self.weight).cumsum(0)
        if len(x.shape) == 2 and x.shape[1] == 5:
            return self.head(torch.tanh(x * scale))
        x = x[:, :5]
        return self.head(torch.tanh(x * scale) if bool((x[:, 0] > -1e9).all()) else x)


def test_torch_func_may_fail_on_a_later_batch():
    torch.manual_seed(0)
    wide = torch.randn(4, 6).double(), labels(4)
    check(Turning(), [vectors(samples=4), wide])


def test_thin_images_with_a_stride_and_a_dilation():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, (3, 1), stride=2, padding=1, dilation=2)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(6, K))
    check(model, [(torch.randn(5, 2, 4, 1).double(), labels(5))])
    diagonal(model.float(), [(torch.randn(5, 2, 4, 1), labels(5))])  # it was float32 that ended the process


def test_group_norm_in_channels_last_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, K))
    check(model, [(torch.randn(5, 4, 3, 3).double().contiguous(memory_format=torch.channels_last), labels(5))])


def test_lists_of_mapping_batches_with_numbers():
    class Named(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    model, (x, y) = Named(5, K).double(), vectors()
    found = diagonal(model, [{"x": x[:4], "scale": 2.0, "labels": y[:4]}, {"x": x[4:], "scale": 2.0, "labels": y[4:]}])
    doubled = nn.Linear(5, K).double()
    doubled.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    assert found.count == 9
    expected = {name: 4 * value for name, value in looped(doubled, [(x, y)]).items()}
    assert reference.worst_error(found.sums, expected) <= 1e-10


def test_refused_clearly():
    model, batch = nn.Linear(5, K).double(), vectors()
    with pytest.raises(InputError, match="objective: must be an Objective"):
        diagonal(model, [batch], objective=F.cross_entropy)
    for lazy in (nn.LazyLinear(K), nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(5, K))):
        with pytest.raises(ModelError, match="call the model once on a batch first"):
            diagonal(lazy, [batch])


@pytest.mark.parametrize("count", [1, 6])
def test_losses_may_work_in_place(count):
    def in_place(logits, targets):
        targets.clamp_(max=K - 1)
        return F.cross_entropy(logits.mul_(1.0), targets, reduction="none")

    model, (x, y) = nn.Linear(5, K).double(), vectors(samples=count)
    before = y.clone()
    found = diagonal(model, [(x, y)] * 2, objective=Objective(losses=in_place)).sums
    assert reference.worst_error(found, looped(model, [(x, y)] * 2)) <= 1e-10
    assert torch.equal(y, before)


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


class AfterTable(nn.Module):
    """A frozen encoder behind a trained table: torch's fast path is open only to passes in which the table needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 8), nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, K)
        self.layer.requires_grad_(False)

    def forward(self, tokens, mask):
        out = self.layer(self.table.weight[tokens], src_key_padding_mask=mask)
        return self.head(out.mean(1))


def test_frozen_encoder_behind_a_table():
    torch.manual_seed(0)
    model, tokens, y = AfterTable().double().eval(), torch.randint(0, 7, (6, 5)), labels(6)
    mask = torch.arange(5)[None] >= torch.tensor([5, 5, 2, 4, 1, 3])[:, None]
    names, expected = ("table.weight", "head.weight", "head.bias"), {}
    for n in range(6):
        loss = F.cross_entropy(model(tokens[n : n + 1], mask[n : n + 1]), y[n : n + 1])
        for name, gradient in zip(names, torch.autograd.grad(loss, [model.get_parameter(name) for name in names]), strict=True):
            expected[name] = expected.get(name, 0) + gradient**2
    assert reference.worst_error(diagonal(model, [(tokens, mask, y)]).sums, expected) <= 1e-10
