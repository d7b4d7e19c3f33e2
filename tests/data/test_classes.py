"""Which objectives are of classes: those that say so, and the default."""

from functools import partial

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge import fisher, metrics
from expunge.data.classes import check_classes, no_labels
from expunge.data.objective import Objective
from expunge.errors import InputError
from tests.methods import cases

FLAT = torch.Size([6, 3])
MISSING = r"^objective: this needs class logits; give Objective\(losses=..., classes=True\) where .*; found classes="


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).square().flatten(1).sum(1)


# cross-entropies under other names, which nobody tries to guess
OWN = {
    "a lambda": lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"),
    "a partial": partial(F.cross_entropy, reduction="none"),
    "a module": nn.CrossEntropyLoss(reduction="none"),
    "smoothed labels": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
}


def test_the_default_objective_is_of_classes():
    for objective in (Objective(), Objective(classes=True), Objective(targets=lambda batch: batch["digit"])):
        assert objective.of_classes
        check_classes(objective, FLAT, "this needs")
        check_classes(objective, torch.Size([6, 3, 4]), "this needs")


@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_ones_own_is_of_classes_where_it_says_so(name):
    assert Objective(losses=OWN[name], classes=True).of_classes
    check_classes(Objective(losses=OWN[name], classes=True), FLAT, "this needs")
    for classes in (None, False):
        assert not Objective(losses=OWN[name], classes=classes).of_classes
        with pytest.raises(InputError, match=f"{MISSING}{classes} and a loss of one's own$"):
            check_classes(Objective(losses=OWN[name], classes=classes), FLAT, "this needs")


@pytest.mark.parametrize("logits", [(6,), (6, 1)])
def test_a_single_logit_is_none_of_classes(logits):
    for classes in (True, False, None):
        with pytest.raises(InputError, match="^objective: this needs logits of shape .* two classes or more"):
            check_classes(Objective(losses=squared, classes=classes), torch.Size(logits), "this needs")


@pytest.mark.parametrize("classes", [3, "yes", 0, 1.0, torch.tensor(True)])
def test_classes_is_true_or_false(classes):
    with pytest.raises(InputError, match="^objective.classes: must be True or False; found"):
        Objective(losses=squared, classes=classes)


def test_classes_may_be_a_flag_of_numpy():
    assert Objective(losses=squared, classes=numpy.bool_(False)).classes is False


def test_the_default_loss_is_always_of_classes():
    with pytest.raises(InputError, match="^objective.classes: must be True with the default loss.*give losses=... too; found False"):
        Objective(classes=False)


def test_no_loss_is_called_to_find_out():
    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("asked")

    model, data = cases.model(), cases.forget()
    said = Objective(losses=losses, classes=True)
    assert metrics.accuracy(model, data, said) == metrics.accuracy(model, data)
    expected = fisher.diagonal(model, data, kind="expected").sums
    assert all(
        torch.equal(squares, expected[name]) for name, squares in fisher.diagonal(model, data, kind="expected", objective=said).sums.items()
    )
    for call in (metrics.accuracy, partial(fisher.diagonal, kind="expected")):
        with pytest.raises(InputError, match="^objective: .* needs class logits; give .*classes=True.*found classes=None"):
            call(model, data, objective=Objective(losses=losses))


def test_targets_that_name_no_output_of_the_head():
    labels, many = torch.tensor([0, 1, 2, 0, 1, 2]), torch.zeros(6, 3, dtype=torch.int64)
    assert not no_labels(Objective(), FLAT, labels) and not no_labels(Objective(losses=squared), FLAT, labels)
    assert no_labels(Objective(), FLAT, many) and no_labels(Objective(), None, labels.float())
    assert no_labels(Objective(losses=squared, classes=False), FLAT, labels)
