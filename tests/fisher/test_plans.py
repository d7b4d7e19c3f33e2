"""A plan says how each parameter is computed and why; a slow one warns, once per call."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge import fisher
from expunge.errors import InputError, SlowFisherWarning
from tests.fisher.cases import build


class Gated(nn.Module):
    """A layer by closed form, a PReLU by torch.func, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.bend, self.last, self.never = nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.bend(self.first(x)))


def batch(samples=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)


def test_ways_reasons_and_shares():
    torch.manual_seed(0)
    model = Gated()
    before = [value.requires_grad for value in model.parameters()]
    plan = fisher.plan(model, batch())
    assert plan["first.weight"].way == "closed form" and plan["first.weight"].operations == "linear"
    assert plan["bend.weight"].way in ("torch.func", "loop") and plan["bend.weight"].reason
    assert plan.named("idle") == ["never.weight", "never.bias"]
    # 6·8 and 8·3 multiplications per sample of the matrices, one per output of the vectors.
    assert plan["first.weight"].share == pytest.approx(48 / (48 + 24 + 8 + 3 + 8))
    assert sum(one.share for one in plan.parameters) == pytest.approx(1)
    assert before == [value.requires_grad for value in model.parameters()] and model.training
    text = str(plan)
    assert "closed form: linear" in text and "bend.weight" in text and "9" not in repr(plan)
    assert repr(plan).startswith("FisherPlan(7 parameters: 4 closed form, 1 ")
    with pytest.raises(InputError, match="name"):
        plan["unknown"]


def test_warns_once_per_call_where_it_is_slow():
    model = Gated()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fisher.diagonal(model, [batch(), batch(), batch()])
    slow = [warning for warning in caught if warning.category is SlowFisherWarning]
    assert len(slow) == 1 and slow[0].filename == __file__
    assert "1 parameter of 7 without a closed form (bend.weight" in str(slow[0].message)


@pytest.mark.parametrize("call", [fisher.diagonal, fisher.by_chunks])
def test_the_warning_names_the_line_of_the_caller(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(Gated(), TensorDataset(*batch(6)), batch_size=3)
    (slow,) = {(warning.filename, warning.lineno) for warning in caught if warning.category is SlowFisherWarning}
    assert slow == (__file__, call_line(test_the_warning_names_the_line_of_the_caller, "call(Gated()"))


def call_line(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


def test_no_warning_where_all_have_closed_forms():
    model, data = build("transformer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fisher.diagonal(model, [data])
    assert fisher.plan(model, data).slow == 0


def test_rows_chosen_by_content_are_named():
    class Unpadded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            kept = x[..., 0] > -9
            return torch.zeros_like(x).masked_scatter(kept[..., None].expand_as(x), self.layer(x[kept])).sum(1)

    torch.manual_seed(0)
    plan = fisher.plan(Unpadded(), (torch.randn(4, 5, 3), torch.tensor([0, 1, 2, 0])))
    assert plan["layer.weight"].way != "closed form"
    assert plan["layer.weight"].reason == "used on rows chosen by their content"
    assert plan.slow == 1


def test_data_of_several_batches_are_refused_with_how_to_take_one():
    data = TensorDataset(*batch(9))
    first = next(iter(DataLoader(data, 8)))  # as the error says: a list of tensors
    assert fisher.plan(Gated(), first).named("idle") == ["never.weight", "never.bias"]
    for several in (data, DataLoader(data, 8), [batch(), batch()], [batch()]):
        with pytest.raises(InputError, match=rf"^batch: must be one batch: next\(iter\(loader\)\) .*; found {type(several).__name__}$"):
            fisher.plan(Gated(), several)


def test_needs_two_samples_and_known_names():
    with pytest.raises(InputError, match="at least two samples"):
        fisher.plan(Gated(), batch(1))
    with pytest.raises(InputError, match="parameters"):
        fisher.plan(Gated(), batch(), parameters=["unknown"])
    assert [one.name for one in fisher.plan(Gated(), batch(), parameters=["last.bias"]).parameters] == ["last.bias"]
