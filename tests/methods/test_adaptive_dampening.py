"""ASSD: the formula weight by weight, the percentile, ties, and weights that matter to nobody."""

import math

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from expunge.errors import InputError, NoEffectWarning
from expunge.methods import ASSD
from expunge.methods.adaptive_dampening import adaptive_threshold, sorted_ratios
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET, REMAIN


def means(few, many, forget=FORGET, remain=REMAIN):
    """Over the forget data, and over all data."""
    return {name: total / forget for name, total in few.items()}, {name: (few[name] + many[name]) / (forget + remain) for name in few}


def all_ratios(forgotten, everything):
    """F_f/F_D of every weight that matters to somebody."""
    pairs = [zip(forgotten[name].flatten().tolist(), everything[name].flatten().tolist(), strict=True) for name in forgotten]
    return [few / all_ for pair in pairs for few, all_ in pair if all_ > 0]


@pytest.mark.parametrize("name", small.NETWORKS)
def test_the_formula(name):
    model = small.network(name)
    outcome = unlearn(model, small.forget(), small.remain(), ASSD(), batch_size=5)
    forgotten, everything = means(*(reference.fisher(model, data.tensors) for data in (small.forget(), small.remain())))
    share = FORGET / (FORGET + REMAIN)
    threshold = reference.percentile(all_ratios(forgotten, everything), 100 - math.log(1 + 100 * share))
    expected = reference.dampened(model, forgotten, everything, threshold, 1.0)
    for parameter, value in outcome.model.named_parameters():
        torch.testing.assert_close(value.detach(), expected[parameter], rtol=1e-9, atol=0, msg=parameter)
    weights = sum(value.numel() for value in model.parameters())
    # The strict > and weights that matter to nobody leave fewer; dampened ones can be zero already.
    assert 0.5 < len(outcome.patch) / (math.log(1 + 100 * share) / 100 * weights) < 1.1
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.1, 0.5, 1.0, 1e30])
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_the_percentile_is_numpys(share, count):
    ratios = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count)).sort().values
    percentile = numpy.percentile(ratios.numpy(), max(0.0, 100 - math.log(1 + 100 * share)))
    found = adaptive_threshold(ratios, share)
    assert found == pytest.approx(percentile, rel=2e-9)
    assert (ratios > found).any()


def test_weights_that_matter_to_nobody_are_no_ratio():
    forgotten = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([[3.0], [0.0]])}
    everything = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[6.0], [5.0]])}
    assert sorted_ratios(forgotten, everything).tolist() == [0.0, 0.5, 2.0]
    nothing = sorted_ratios({"a": torch.zeros(3)}, {"a": torch.zeros(3)})
    assert len(nothing) == 0 and adaptive_threshold(nothing, 0.1) == math.inf


def apart(forget_columns: int) -> tuple[nn.Linear, TensorDataset, TensorDataset]:
    """A layer of 8 inputs, of which the forget data use the first ones and the remain data the others, except the last, used by none."""
    with torch.random.fork_rng([]):
        torch.manual_seed(6)
        model, images = nn.Linear(8, 3, bias=False).double(), torch.rand(30, 8).double() + 0.5
    images[:, 7] = 0
    images[:10, forget_columns:], images[10:, :forget_columns] = 0, 0
    labels = torch.arange(30) % 3
    return model, TensorDataset(images[:10], labels[:10]), TensorDataset(images[10:], labels[10:])


@pytest.mark.parametrize("forget_columns", [1, 3])
def test_all_weights_that_share_the_largest_ratio_are_dampened(forget_columns):
    """Theirs is n/n_f = 3 but for rounding, and they are far more than ln(1 + 100/3) = 3.5 % of all."""
    model, forget, remain = apart(forget_columns)
    changed = unlearn(model, forget, remain, ASSD()).model.weight
    torch.testing.assert_close(changed[:, :forget_columns], model.weight[:, :forget_columns] / 3)
    assert torch.equal(changed[:, forget_columns:], model.weight[:, forget_columns:])


def test_nothing_to_dampen_is_said():
    model, forget, remain = apart(3)
    nothing = TensorDataset(torch.zeros_like(forget.tensors[0]), forget.tensors[1])  # no gradient at any weight
    with pytest.warns(NoEffectWarning, match="nothing was dampened: no weight matters so much more to the forget data"):
        outcome = unlearn(model, nothing, remain, ASSD())
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


@pytest.mark.parametrize("rows", [range(1), range(0, 48, 3), range(40)], ids=["one", "a third", "most"])
def test_any_number_of_samples(rows):
    model = cases.model()
    outcome = unlearn(model, Subset(cases.dataset(), rows), Subset(cases.dataset(), sorted({*range(48)} - {*rows})), ASSD())
    properties.assert_finite(outcome.model)
    assert len(outcome.patch) and "0.bias" not in outcome.patch.edits  # which is frozen


def test_all_data_are_needed():
    with pytest.raises(InputError, match="^remain: ASSD needs the data to keep"):
        unlearn(cases.model(), cases.forget(), method=ASSD())
