"""LFSSD: the formula weight by weight, and that neither labels nor the loss matter."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge.data.objective import Objective
from expunge.errors import InputError, NoEffectWarning
from expunge.methods import LFSSD
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET, REMAIN
from tests.methods.test_dampening import assert_dampened


@pytest.mark.parametrize("name", small.NETWORKS)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_formula(name, batch_size):
    model = small.network(name)
    outcome = unlearn(model, small.forget(), small.remain(), LFSSD(1.2, 0.8), batch_size=batch_size)
    few, many = (reference.absolute_gradients(model, data.tensors[0], 2) for data in (small.forget(), small.remain()))
    forgotten = {name: total / FORGET for name, total in few.items()}
    everything = {name: (total + many[name]) / (FORGET + REMAIN) for name, total in few.items()}
    assert_dampened(model, outcome.model, forgotten, everything, 1.2, 0.8)
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def test_a_known_answer():
    """z = w·x: |∂z²/∂w| = 2·|w|·x², so 8·|w| for the forget sample x = 2, (8 + 2)/2·|w| for all: w ← 5/8·w."""
    model = nn.Linear(1, 1, bias=False).double()
    forget, remain = (TensorDataset(torch.full((1, 1), x).double(), torch.zeros(1, 1).double()) for x in (2.0, 1.0))
    objective = Objective(losses=lambda outputs, targets: (outputs - targets).square().sum(1), classes=False)
    changed = unlearn(model, forget, remain, LFSSD(threshold=1.5), objective=objective, watch={}).model
    torch.testing.assert_close(changed.weight, model.weight * 5 / 8)
    with pytest.warns(NoEffectWarning, match="nothing was dampened"):
        unlearn(model, forget, remain, LFSSD(threshold=1.7), objective=objective, watch={})


def unlabelled(data) -> TensorDataset:
    images = torch.stack([image for image, _ in data])
    return TensorDataset(images, torch.zeros(len(images), dtype=torch.int64))


def test_labels_do_not_matter():
    first = unlearn(cases.model(), cases.forget(), cases.remain(), LFSSD(1.5)).model
    second = unlearn(cases.model(), unlabelled(cases.forget()), unlabelled(cases.remain()), LFSSD(1.5)).model
    properties.assert_same_weights(first.state_dict(), second.state_dict())


def test_data_without_labels():
    """A batch is what the model takes, nothing else; no loss is ever asked for."""

    def refuse(*arguments):
        raise AssertionError("must not be asked for")

    first = unlearn(cases.model(), cases.forget(), cases.remain(), LFSSD(1.5), batch_size=16).model
    bare = [[{"input": images} for images in unlabelled(part).tensors[0].split(16)] for part in (cases.forget(), cases.remain())]
    objective = Objective(outputs=lambda model, batch: model(batch["input"]), losses=refuse, classes=False)
    second = unlearn(cases.model(), *bare, LFSSD(1.5), objective=objective, watch={}).model
    properties.assert_same_weights(first.state_dict(), second.state_dict())


def test_a_huge_threshold_is_the_identity_and_says_so():
    model = cases.model()
    with pytest.warns(NoEffectWarning, match="nothing was dampened"):
        outcome = unlearn(model, cases.forget(), cases.remain(), LFSSD(1e12))
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def test_frozen_weights_stay():
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), LFSSD(threshold=0.0, dampening=0.1))
    assert "0.bias" not in outcome.patch.edits and len(outcome.patch) > 0


@pytest.mark.parametrize("argument", ["threshold", "dampening"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_bad_settings_are_named(argument, value):
    with pytest.raises(InputError, match=f"^{argument}: must be 0 or more"):
        LFSSD(**{argument: value})
