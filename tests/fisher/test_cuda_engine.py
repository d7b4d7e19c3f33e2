"""The engine on a GPU, its passes replayed as graphs, gives what the definition gives on the CPU."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from expunge.data.batches import Batches
from expunge.fisher import adders, diagonal
from expunge.fisher.closed_forms import convolution
from tests import reference
from tests.fisher.cases import MODELS, Pooled, build

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


def on_gpu(model, batch):
    """Batches of 2, 2, 2 and 1: the second of a shape is captured, the third replayed."""
    parts = [tuple(tensor.cuda() for tensor in part) for part in zip(*(tensor.split(2) for tensor in batch), strict=True)]
    return {name: sums.cpu() for name, sums in diagonal(copy.deepcopy(model).cuda(), parts).sums.items()}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition(name):
    model, batch = build(name)
    assert reference.worst_error(on_gpu(model, batch), reference.fisher(model, batch)) <= 1e-10


def test_recurrent_layers_with_dropout_have_gradients_in_eval_mode():
    torch.manual_seed(0)
    model = Pooled(nn.LSTM(5, 6, num_layers=2, dropout=0.5, batch_first=True), 6).double().eval()
    batch = (torch.randn(7, 3, 5).double(), torch.randint(4, (7,)))
    assert reference.worst_error(on_gpu(model, batch), reference.fisher(model, batch)) <= 1e-10


def test_memory_is_given_back_at_once():
    """Nothing waits for the garbage collector: the next pass of the user's may need it."""
    model, batch = build("residual", torch.float32)
    model, batch = model.cuda(), tuple(tensor.cuda() for tensor in batch)
    found = diagonal(model, [batch] * 3)
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        found = diagonal(model, [batch] * 3)
        assert found.count == 21 and torch.cuda.memory_allocated() <= before
    finally:
        gc.enable()


def test_graphs_of_smaller_batches_stay_sound():
    """Larger batches take larger buffers; a graph goes on writing into those it was captured with."""
    model, batch = build("residual", torch.float32)
    model, few = model.cuda(), tuple(tensor[:2].cuda() for tensor in batch)
    many = tuple(tensor.repeat(64, *[1] * (tensor.dim() - 1)) for tensor in few)
    others: list[torch.Tensor] = []

    def batches():
        yield from (few, few, few, many)
        others.extend(torch.ones(size, device="cuda") for size in range(64, 4096, 64) for _ in range(4))
        yield from (few, few)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = diagonal(model, Batches(lambda seed: batches(), 6)).sums
        expected = diagonal(model, [few]).sums
    assert all(bool((each == 1).all()) for each in others)
    assert reference.worst_error(found, {name: (5 + 64) * sums for name, sums in expected.items()}) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_float32_without_tf32(name):
    model, batch = build(name, torch.float32)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = on_gpu(model, batch)
    assert reference.worst_error(found, reference.fisher(model, batch)) <= 1e-5


def test_convolutions_are_squared_in_tf32_where_they_are_computed_so(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Tanh(), nn.Conv2d(32, 24, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(600, 4)).eval()
    batch = (torch.randn(7, 3, 13, 13), torch.randint(4, (7,)))
    expected = reference.fisher(model, batch)
    chosen, choose = set(), convolution.choose
    monkeypatch.setattr(convolution, "choose", lambda *arguments: chosen.add(way := choose(*arguments)) or way)
    for allowed, low, high in ((True, 1e-5, 1e-2), (False, 0.0, 1e-5)):
        chosen.clear()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            error = reference.worst_error(on_gpu(model, batch), expected)
        assert (convolution.by_tiles in chosen) == allowed
        assert low <= error <= high


@pytest.mark.parametrize("kind", ["empirical", "expected"])
@pytest.mark.parametrize("name", MODELS)
def test_later_calls_equal_the_definition(name, kind):
    """Their graphs are captured at once, where the first call could be."""
    model, batch = build(name)
    batch = tuple(torch.cat([tensor] * 6) for tensor in batch)  # enough that few are not all compared with
    parts = [tuple(tensor.cuda() for tensor in part) for part in zip(*(tensor.split(20) for tensor in batch), strict=True)]
    expected = reference.fisher(model, batch, kind)
    model.cuda()
    for _ in range(3):
        found = {name: sums.cpu() for name, sums in diagonal(model, parts, kind=kind).sums.items()}
        assert reference.worst_error(found, expected) <= 1e-10


def test_later_calls_make_no_eager_pass(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).cuda()
    batches = [(torch.randn(20, 3, 8, 8).cuda(), torch.randint(5, (20,)).cuda()) for _ in range(3)]
    passes, step = [], adders.planned_pass
    monkeypatch.setattr(adders, "planned_pass", lambda *given: passes.append(torch.cuda.is_current_stream_capturing()) or step(*given))
    for _ in range(3):
        diagonal(model, batches)
    assert passes == [False, True, True, True]


def test_the_label_at_which_samples_are_compared_is_one_that_counts(monkeypatch):
    """A graph is for one number, so it is chosen before: of eight labels, all but one of probability exp(-30)."""
    model, seen = nn.Linear(3, 8).cuda(), []
    with torch.no_grad():
        model.bias.copy_(torch.tensor([-30.0] * 5 + [0.0, 0.5, -30.0]))
    step = adders.planned_pass

    def noted(*given):
        result = step(*given)
        seen.append(result.number)
        return result

    monkeypatch.setattr(adders, "planned_pass", noted)
    batches = [(torch.randn(20, 3).cuda(), torch.randint(8, (20,)).cuda()) for _ in range(3)]
    for seed in range(5):
        diagonal(model, batches, kind="expected", seed=seed)
    assert seen and set(seen) <= {5, 6}
