"""Modes are borrowed and given back; what the caller has set around stays right."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from expunge import metrics
from expunge.runtime import modes
from expunge.runtime.modes import hooked, in_mode
from expunge.training.loop import train
from expunge.training.schedules import Constant
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning

SETTINGS = Tuning(Constant(0.2, 3), batch_size=16)


def data() -> TensorDataset:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


def alone(model: nn.Module, settings: Tuning) -> None:
    train(model, data(), settings)


def beside_one_that_ends_first(model: nn.Module, settings: Tuning) -> None:
    short = Tuning(Constant(0.2, 1), 16, precision=settings.precision)
    train_together([Training(network(), data(), short), Training(model, data(), settings)])


@pytest.mark.parametrize("way", [alone, beside_one_that_ends_first])
def test_a_training_within_the_callers_autocast_sees_its_own_steps(way):
    """Autocast keeps its casts of the weights for as long as it lasts, and so those from before the first step."""
    expected, found = network(), network()
    way(expected, Tuning(Constant(0.2, 3), batch_size=16, precision="bfloat16"))
    with torch.autocast("cpu", torch.bfloat16):
        found(data().tensors[0])  # a cast from before
        way(found, SETTINGS)
        logits = found(data().tensors[0])
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)
    assert torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits, expected(data().tensors[0]))


def test_what_is_measured_within_the_callers_autocast_is_the_model_as_it_is():
    model, held = network(), data()
    with torch.autocast("cpu", torch.bfloat16):
        before = metrics.accuracy(model, held)
        with torch.no_grad():
            model[2].weight.neg_()
            model[2].bias.neg_()
        assert metrics.accuracy(model, held) == pytest.approx(1 - before)


class Dropping(nn.LSTM):
    def forward(self, x, state=None):
        return super().forward(F.dropout(x, 0.5, self.training), state)


def test_recurrent_layers_on_cuda_train_without_dropout_and_others_of_ones_own_do_not(monkeypatch):
    monkeypatch.setattr(modes, "_on_cuda", lambda module: True)
    model = nn.ModuleList([nn.LSTM(3, 4, 2, dropout=0.5), nn.GRU(3, 4), Dropping(3, 4), nn.Dropout(0.5)]).train()
    before = copy.deepcopy(model)
    with in_mode(model, training=False):
        assert [module.training for module in model] == [True, True, False, False] and model[0].dropout == 0
        with in_mode(model, training=False):
            assert model[0].training and model[0].dropout == 0
    assert all(module.training for module in model) and model[0].dropout == before[0].dropout == 0.5
    with in_mode(model, training=True):
        assert model[0].dropout == 0.5


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_any_kind_are_seen(kind):
    """A graph would not call them: such a model is not captured."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    assert not hooked(model)
    handle = getattr(model[0], f"register_{kind}_hook")(lambda *_: None)
    assert hooked(model)
    handle.remove()
    assert not hooked(model)


def test_torchs_own_hooks_compute_with_tensors_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    nn.utils.spectral_norm(model[1])
    assert not hooked(model)
    model[2].register_forward_hook(partial(print))
    assert hooked(model)
