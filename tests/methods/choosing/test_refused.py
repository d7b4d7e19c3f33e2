"""Input that a choice cannot be made for is named before any work."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from expunge import Choose, FisherMask, InputError, ModelError, unlearn
from expunge.data.objective import Objective
from tests.methods import cases, properties
from tests.methods.choosing.small import CLASS, CLASSES, DATA, TEST, UNSEEN, WIDTH


def turned(model: nn.Module) -> nn.Module:
    """Always another class than it knows."""
    other = nn.Sequential(*model, nn.Linear(CLASSES, CLASSES, bias=False))
    with torch.no_grad():
        other[-1].weight.copy_(torch.eye(CLASSES).roll(1, 0))
    return other


BAD = {
    "no epochs": ({"epochs": 0}, "epochs: must be at least 1, a pass over the remain data, or None; found 0"),
    "epochs below zero": ({"epochs": -3}, "epochs: must be at least 1"),
    "epochs nan": ({"epochs": math.nan}, "epochs: must be at least 1"),
    "no seconds": ({"seconds": 0}, "seconds: must be a positive number, or None; found 0"),
    "seconds nan": ({"seconds": math.nan}, "seconds: must be a positive number"),
    "max_drop above 1": ({"max_drop": 2}, r"max_drop: must be a fraction in \[0, 1\]; found 2"),
    "max_drop below 0": ({"max_drop": -0.1}, r"max_drop: must be a fraction in \[0, 1\]"),
    "max_drop of text": ({"max_drop": "5 %"}, "max_drop: "),
    "empty validation": ({"validation": []}, "validation: must not be empty"),
    "validation that was trained on": ({"validation": Subset(DATA, range(300))}, "validation: must not hold samples of the forget set"),
    "validation of remain samples": ({"validation": Subset(CLASS[1], range(9))}, "validation: must not hold samples of the remain data"),
    "validation is remain": ({"validation": CLASS[1]}, "validation: must be data that the model was never trained on"),
    "validation of another shape": ({"validation": TensorDataset(torch.zeros(9, 3), torch.ones(9).long())}, "validation: "),
    "validation of other labels": (
        {"validation": TensorDataset(torch.zeros(9, WIDTH), torch.full((9,), 7))},
        "validation: labels must be in",
    ),
    "validation of the class alone": (
        {"validation": Subset(UNSEEN, range(0, 240, 4))},
        r"validation: must hold samples of classes that stay; found none but of \[0\]",
    ),
    "epochs beside a method": ({"method": FisherMask(), "epochs": 3}, "epochs: is for a method to be chosen; leave it out"),
    "max_drop beside Choose": ({"method": Choose(), "max_drop": 0.1}, "max_drop: is for a method to be chosen; leave it out"),
    "validation beside a method": ({"method": FisherMask(), "validation": UNSEEN}, "validation: is for a method to be chosen"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_before_any_work(model, name):
    options, message = BAD[name]
    with properties.assert_untouched(model), pytest.raises(InputError, match=f"^{message}"):
        unlearn(model, *CLASS, **options)


def test_models_and_sets_that_cannot_be_had_are_named(model):
    with pytest.raises(ModelError, match=r"^model: must be better than chance, 0\.25, .*found an accuracy of 0$"):
        unlearn(turned(model), *CLASS)
    with pytest.raises(InputError, match=r"^forget: must leave a class to keep where there are no remain data; .*found all 4 classes"):
        unlearn(model, DATA)
    own = Objective(losses=lambda logits, targets: (logits[:, 0] - targets).square(), classes=False)
    with pytest.raises(InputError, match="^objective: to choose a method needs class logits"):
        unlearn(model, *CLASS, objective=own, watch={})
    soft = TensorDataset(TEST.tensors[0], torch.rand(400, CLASSES).softmax(1))
    with pytest.raises(InputError, match="^remain: labels must be integers, for a method to be chosen; give a method"):
        unlearn(model, CLASS[0], soft, watch={})


def test_rate_and_seed_are_checked():
    for settings in ({"rate": 0}, {"rate": math.inf}, {"seed": 1.5}, {"seconds": math.inf}):
        with pytest.raises(InputError, match=f"^{next(iter(settings))}: "):
            Choose(**settings)
    assert hash(Choose(epochs=2)) == hash(Choose(epochs=2)) and repr(cases.UNLISTED["choose"]()).startswith("Choose(epochs=2")
