"""The engine equals the definition, for every operation, at any batch size and order, and leaves everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge.data.batches import Batches
from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import diagonal
from expunge.fisher.borrowing import undisturbed
from expunge.fisher.closed_forms import tf32
from expunge.fisher.planning.survey import survey
from tests import reference
from tests.fisher.cases import CLASSES, MODELS, build


def split(batch, sizes):
    return list(zip(*(tensor.split(sizes) for tensor in batch), strict=True))


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's, on one of the cases


@pytest.mark.parametrize("kind", ["empirical", "expected"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition_at_any_batch_size(name, kind):
    model, batch = build(name)
    expected = reference.fisher(model, batch, kind)
    for sizes in ([7], [2, 5], [3, 3, 1], [1] * 7):
        found = diagonal(model, split(batch, sizes), kind=kind)
        assert found.count == 7
        assert reference.worst_error(found.sums, expected) <= 1e-10, sizes


@pytest.mark.parametrize("name", MODELS)
def test_float32_is_no_worse_than_twice_the_float32_loop(name):
    model, batch = build(name, torch.float32)
    exact = reference.fisher(model, batch)
    loop = reference.fisher(model, batch, dtype=torch.float32)
    found = diagonal(model, [batch]).sums
    for key, value in exact.items():
        size, rounding = float(value.norm()) or 1.0, 4 * torch.finfo(torch.float32).eps
        assert float((found[key] - value).norm()) / size <= max(2 * float((loop[key] - value).norm()) / size, rounding), key


# What the closed forms cover: a parameter that silently falls back would still be exact, and slow.
FALLBACKS = {
    "prelu": {"1.weight"},
    "bilinear": {"layer.weight", "layer.bias"},
    "weight norm": {"direction", "length"},
    "one class token added": {"token"},
}


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"lstm", "gru", "data-dependent", "rare use", "late use"}))
def test_closed_forms_cover(name):
    model, batch = build(name)
    parameters = dict(model.named_parameters())
    with undisturbed(model, parameters):
        plan = survey(model, parameters, batch, Objective())
    unused = {key for key in parameters if "never" in key}
    assert set(parameters) - set(plan.layouts) - unused == FALLBACKS.get(name, set())


def test_order_of_samples_does_not_matter():
    model, (x, y) = build("residual")
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    one, two = diagonal(model, [(x, y)]), diagonal(model, [(x[order], y[order])])
    assert reference.worst_error(one.sums, two.sums) <= 1e-13


def test_batch_kind_is_the_released_rule_and_depends_on_the_batch():
    model, batch = build("residual")
    found = diagonal(model, [batch, batch], kind="batch")
    assert found.count == 2
    assert reference.worst_error(found.mean(), reference.batch_fisher(model, batch)) <= 1e-12
    halves = diagonal(model, split(batch, [4, 3]), kind="batch")
    assert reference.worst_error(halves.mean(), found.mean()) > 0.1


@pytest.mark.parametrize("name", ["residual", "transformer", "called twice", "embedding"])
def test_leaves_everything_as_it_was(name):
    model, batch = build(name)
    next(model.parameters()).requires_grad_(False)
    model.train()
    list(model.children())[-1].eval()
    last = list(model.parameters())[-1]
    last.grad = torch.full_like(last, 3.0)
    calls = []
    list(model.children())[-1].register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    random = torch.random.get_rng_state()
    found = diagonal(model, [batch])
    with pytest.raises(InputError):
        diagonal(model, [batch, (batch[0], batch[1] + CLASSES)])
    assert calls
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert torch.equal(last.grad, torch.full_like(last, 3.0))
    assert all(parameter.grad is None for parameter in list(model.parameters())[:-1])
    assert torch.equal(random, torch.random.get_rng_state())
    assert set(found.sums) == {key for key, value in model.named_parameters() if value.requires_grad}


def test_interrupted_leaves_everything_as_it_was():
    model, batch = build("residual")
    model.train()

    def interrupted():
        yield batch
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagonal(model, Batches(lambda seed: interrupted(), 2))
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    model(batch[0]).sum().backward()  # torch's own functions are back


NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


@pytest.mark.skipif(not NEWER, reason="a setting of torch 2.9")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_may_be_set_by_its_newer_names(precision):
    """PyTorch then refuses to read the older ones."""
    model, batch = build("conv2d")
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = precision
        assert tf32.in_matmuls() == tf32.in_convolutions() == (precision == "tf32")
        with tf32.switched_off():
            assert not tf32.in_matmuls() and not tf32.in_convolutions()
        diagonal(model, [batch])
        assert [setting.fp32_precision for setting in settings] == [precision] * 2
    finally:
        for setting, was in zip(settings, before, strict=True):
            setting.fp32_precision = was


def test_tf32_is_read_by_its_older_names():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        for allowed in (True, False):
            matmul.allow_tf32, cudnn.allow_tf32 = allowed, not allowed
            assert (tf32.in_matmuls(), tf32.in_convolutions()) == (allowed, not allowed)
            with tf32.switched_off():
                assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, not allowed)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def test_parameters_can_be_named():
    model, batch = build("residual")
    everything = diagonal(model, [batch])
    some = diagonal(model, [batch], parameters=["second.weight", "norm.bias"])
    assert list(some.sums) == ["second.weight", "norm.bias"]
    assert all(torch.allclose(some.sums[name], everything.sums[name], rtol=1e-12) for name in some.sums)


def test_works_inside_no_grad_and_inference_mode():
    model, batch = build("residual")
    expected = diagonal(model, [batch]).sums
    with torch.no_grad():
        assert reference.worst_error(diagonal(model, [batch]).sums, expected) <= 1e-14
    with torch.inference_mode():
        assert reference.worst_error(diagonal(model, [batch]).sums, expected) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_wider(dtype):
    model, batch = build("residual")
    exact = reference.fisher(model, batch)
    found = diagonal(copy.deepcopy(model).to(dtype), [(batch[0].to(dtype), batch[1])])
    assert all(total.dtype == torch.float64 for total in found.sums.values())
    assert reference.worst_error(found.sums, exact) < 0.2


def test_autocast():
    model, batch = build("residual", torch.float32)
    exact = reference.fisher(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = diagonal(model, [batch])
    error = reference.worst_error(found.sums, exact)
    assert 1e-4 < error < 0.2  # coarse as bfloat16 is, and only so coarse


def test_own_objective_dict_batches_and_tensor_outputs():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, CLASSES).double()

        def forward(self, pixels, scale):
            return {"logits": self.inner(pixels) * scale}

    model = Named()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, CLASSES, (7,))
    scale = torch.ones(7, 1, dtype=torch.float64)
    found = diagonal(model, [{"pixels": x, "scale": scale, "labels": y}])
    inner = {name.removeprefix("inner."): value for name, value in found.sums.items()}
    assert reference.worst_error(inner, reference.fisher(model.inner, (x, y))) < 1e-12
    squared = Objective(losses=lambda logits, targets: 0.5 * (logits - targets).square().sum(1))
    target = torch.randn(7, CLASSES, dtype=torch.float64)
    found = diagonal(model.inner, [(x, target)], objective=squared)
    slopes = model.inner(x).detach() - target
    assert torch.allclose(found.sums["bias"], slopes.square().sum(0))
    assert torch.allclose(found.sums["weight"], slopes.square().t() @ x.square())


@pytest.mark.parametrize("name", ["frames in the batch", "sequence first", "attention module, sequence first", "linear on sequences"])
def test_lengths_may_differ_from_batch_to_batch(name):
    model, (x, y) = build(name)
    short, long = (x[:3], y[:3]), (torch.cat([x, 2 * x], 1)[3:], y[3:])
    first, second = reference.fisher(model, short), reference.fisher(model, long)
    found = diagonal(model, [short, long])
    assert reference.worst_error(found.sums, {key: first[key] + second[key] for key in first}) <= 1e-10


def test_half_precision_of_large_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Flatten(), nn.Linear(1200, CLASSES))
    batch = torch.randn(3, 2, 600), torch.randint(0, CLASSES, (3,))
    found = diagonal(copy.deepcopy(model).bfloat16(), [(batch[0].bfloat16(), batch[1])])
    assert reference.worst_error(found.sums, reference.fisher(model, batch)) < 0.1


def test_positions_of_a_sample_are_summed_before_the_square():
    torch.manual_seed(0)
    model, x = nn.Conv1d(2, CLASSES, 1).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (5, 3))
    found = diagonal(model, [(x, y)]).sums["weight"]
    total = torch.zeros_like(found)
    for index in range(5):
        loss = nn.functional.cross_entropy(model(x[index : index + 1]), y[index : index + 1], reduction="sum")
        total += torch.autograd.grad(loss, model.weight)[0] ** 2
    assert torch.allclose(found, total)


def test_a_batch_that_does_not_fit_is_split(monkeypatch):
    model, batch = build("residual")
    expected = diagonal(model, [batch], kind="sampled", draws=2, seed=5).sums
    sizes, whole = [], Objective().outputs

    def outputs(model, batch):
        sizes.append(len(batch[0]))
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(model, batch)

    found = diagonal(model, [batch], kind="sampled", draws=2, seed=5, objective=Objective(outputs=outputs))
    assert found.count == 7 and 7 in sizes
    assert reference.worst_error(found.sums, expected) < 1e-12
    sizes.clear()
    assert diagonal(model, [batch] * 4, objective=Objective(outputs=outputs)).count == 28
    assert sizes.count(7) == 1  # what did not fit once is not tried again
    with pytest.raises(torch.OutOfMemoryError):
        diagonal(model, [batch], objective=Objective(outputs=lambda model, batch: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))))


def test_many_samples_lose_nothing():
    """10⁷ equal samples through float32: the sum is 10⁷ times one, where float32 sums would stop growing at 2²⁴."""
    model = nn.Linear(1, 2)
    x, y = torch.ones(100_000, 1), torch.zeros(100_000, dtype=torch.int64)
    one = diagonal(model, [(x[:1], y[:1])]).sums["weight"]
    found = diagonal(model, [(x, y)] * 100)
    assert found.count == 10**7
    assert torch.allclose(found.mean()["weight"], one, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m, x, y: (m, [(x, y + CLASSES)]), InputError, "labels must be in"),
        (lambda m, x, y: (m, [(x.index_fill(0, torch.tensor([2]), float("nan")), y)]), InputError, "must be finite"),
        (lambda m, x, y: (m, [("a", "b")]), InputError, "batches"),
        (lambda m, x, y: (m, []), InputError, "empty"),
        (lambda m, x, y: (m, 3), InputError, "batches"),
        (lambda m, x, y: (m, [(x, y[:3])]), InputError, "first dimension"),
        (lambda m, x, y: (nn.Flatten(), [(x, y)]), ModelError, "no parameters"),
        (lambda m, x, y: (m.requires_grad_(False), [(x, y)]), ModelError, "no parameters"),
        (lambda m, x, y: (lambda x: x, [(x, y)]), InputError, "torch.nn.Module"),
    ],
)
def test_bad_input(change, error, message):
    model, (x, y) = build("residual")
    with pytest.raises(error, match=message):
        changed, batches = change(model, x, y)
        diagonal(changed, batches)


def test_bad_models():
    model, batch = build("residual")
    with pytest.raises(InputError, match="kind"):
        diagonal(model, [batch], kind="fisher")
    with pytest.raises(InputError, match="parameters"):
        diagonal(model, [batch], parameters=["nothing"])
    model.second.weight.data[0, 0, 0, 0] = float("inf")
    with pytest.raises((InputError, ModelError), match="second.weight"):
        diagonal(model, [batch])
    mixing = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES))
    with pytest.raises(ModelError, match="running statistics"):
        diagonal(mixing, [(torch.randn(7, 5), batch[1])])

    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    with pytest.raises(ModelError, match="rest of its batch"):
        diagonal(Centred(5, CLASSES), [(torch.randn(7, 5), batch[1])])

    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x))

    with pytest.raises(ModelError, match="from call to call"):
        diagonal(Noisy(5, CLASSES), [(torch.randn(7, 5), batch[1])])


def test_batch_size_cuts_a_dataset():
    model, dataset = nn.Linear(3, 4), TensorDataset(torch.randn(10, 3), torch.randint(0, 4, (10,)))
    assert [diagonal(model, dataset, kind="batch", batch_size=size).count for size in (1, 4, 10, 128)] == [10, 3, 1, 1]
    assert diagonal(model, dataset, kind="batch").count == 1
    assert diagonal(model, DataLoader(dataset, 5), kind="batch", batch_size=3).count == 2  # a loader keeps its own
    small, whole = (diagonal(model, dataset, batch_size=size) for size in (3, 10))
    assert small.count == whole.count == 10
    torch.testing.assert_close(small.sums, whole.sums)
    for wrong in (0, -1, 2.5, True, "3"):
        with pytest.raises(InputError, match="^batch_size: "):
            diagonal(model, dataset, batch_size=wrong)
