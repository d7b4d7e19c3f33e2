"""Copies share nothing with the original and can be trained, TorchScript modules too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge import Constant, Finetune, FisherMask, Tuning, unlearn
from expunge.model.copying import copied

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


def samples(start: int, count: int) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(start))
    return TensorDataset(inputs, torch.arange(count) % 3)


SCRIPTED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, torch.zeros(2, 4)),
    "in part": lambda model: nn.Sequential(torch.jit.script(model[:2]), model[2:]),
}


@pytest.mark.parametrize("form", SCRIPTED)
def test_torchscript_is_unlearned_as_the_model_it_was_made_of(form: str) -> None:
    methods = (FisherMask(0.2, tuning=None), Finetune(Tuning(Constant(0.1, 2), batch_size=8)))
    for method in methods[: 1 if form == "traced" else 2]:  # a trace keeps the mode it was made in, so it trains in another way
        expected = unlearn(network(), samples(0, 12), samples(1, 40), method, progress=False).model
        model = SCRIPTED[form](network())
        before = [value.clone() for value in model.state_dict().values()]
        found = unlearn(model, samples(0, 12), samples(1, 40), method, progress=False).model
        for value, other in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
            torch.testing.assert_close(value, other)
        assert all(torch.equal(value, old) for value, old in zip(model.state_dict().values(), before, strict=True))


@pytest.mark.parametrize("form", SCRIPTED)
def test_a_copy_has_leaves_that_ask_for_gradients_where_the_original_does(form: str) -> None:
    model = SCRIPTED[form](network())
    next(model.parameters()).requires_grad_(False)
    copy = copied(model)
    assert [value.requires_grad for value in copy.parameters()] == [value.requires_grad for value in model.parameters()]
    assert all(value.is_leaf for value in copy.parameters())
    assert not {value.data_ptr() for value in copy.parameters()} & {value.data_ptr() for value in model.parameters()}
