"""Labels must be outputs of the head, whatever the loss is called; targets that are none are left to the loss."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge import fisher, metrics
from expunge.curvature import gradient
from expunge.data.batches import as_batches
from expunge.data.labels import check_taken
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.methods import Finetune, GradientAscent
from expunge.training.loop import train
from expunge.unlearning import unlearn
from tests.methods import cases, properties
from tests.methods.cases import CASES, QUICK

IMAGES, LABELS = cases.dataset().tensors
WRONG = LABELS.masked_fill(torch.arange(48) == 3, 7)  # one of the forget data
FEW, MANY = slice(0, 48, 3), [row for row in range(48) if row % 3]


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses = super().forward(input, target)
        return (1 - (-losses).exp()) ** 2 * losses


# cross-entropies under other names
ENTROPIES = {
    "a module": nn.CrossEntropyLoss(reduction="none"),
    "a lambda": lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"),
    "a partial": partial(F.cross_entropy, reduction="none"),
    "smoothed labels": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
    "weighted classes": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="none"),
    "a subclass": Focal(reduction="none"),
    "log-likelihood": lambda logits, targets: F.nll_loss(logits.log_softmax(1), targets, reduction="none"),
    "gathered": lambda logits, targets: -logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1),
    "one-hot": lambda logits, targets: -(F.one_hot(targets, 3) * logits.log_softmax(1)).sum(1),
    "a margin": lambda logits, targets: F.multi_margin_loss(logits, targets, reduction="none"),
}
RULE = r"labels must be in \[0, 3\), the outputs of the head; found 7"


@pytest.mark.parametrize("method", ["gradient-ascent", "finetune", "fisher-mask", "random-mask", "bad-teacher", "retrain", "influence"])
@pytest.mark.parametrize("name", ENTROPIES)
def test_a_label_that_the_head_does_not_have_is_named_before_any_work(name, method):
    model, objective = cases.model(), Objective(losses=ENTROPIES[name])
    with properties.assert_untouched(model), pytest.raises(InputError, match=f"^forget: {RULE}"):
        unlearn(model, (IMAGES[FEW], WRONG[FEW]), (IMAGES[MANY], LABELS[MANY]), CASES[method](), objective=objective, watch={})
    if (name, method) == ("a margin", "influence"):
        message = "^objective: curvature needs a model and a loss that can be differentiated twice; found RuntimeError: derivative for"
        with pytest.raises(InputError, match=message):
            unlearn(model, (IMAGES[FEW], LABELS[FEW]), (IMAGES[MANY], LABELS[MANY]), CASES[method](), objective=objective)
        return
    good = unlearn(model, (IMAGES[FEW], LABELS[FEW]), (IMAGES[MANY], LABELS[MANY]), CASES[method](), objective=objective)
    properties.assert_finite(good.model)


@pytest.mark.parametrize("name", ENTROPIES)
def test_a_label_that_the_head_does_not_have_is_named_in_every_function(name):
    objective = Objective(losses=ENTROPIES[name])
    for call in (
        lambda: fisher.diagonal(cases.model(), (IMAGES, WRONG), objective=objective),
        lambda: train(cases.model(), (IMAGES, WRONG), QUICK, objective),
        lambda: gradient(cases.model(), as_batches((IMAGES, WRONG)), objective),
        lambda: metrics.mean_loss(metrics.logits(cases.model(), (IMAGES, WRONG)), objective),
        lambda: metrics.accuracy(cases.model(), (IMAGES, WRONG), objective),
        lambda: unlearn(
            cases.model(), (IMAGES[FEW], LABELS[FEW]), (IMAGES[:48:5], WRONG[:48:5] + 5), Finetune(QUICK), objective=objective, watch={}
        ),
    ):
        with pytest.raises(InputError, match=r"labels must be in \[0, 3\), the outputs of the head; found"):
            call()


def per_position(logits: Tensor, targets: Tensor, ignored: int = 255) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=ignored).flatten(1).sum(1)


def ordinal(logits: Tensor, targets: Tensor) -> Tensor:
    """K thresholds, K + 1 grades."""
    passed = (targets[:, None] > torch.arange(logits.shape[1])).to(logits)
    return F.binary_cross_entropy_with_logits(logits, passed, reduction="none").sum(1)


def many(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").sum(1)


def negative_binomial(logits: Tensor, targets: Tensor) -> Tensor:
    return logits[:, 0].exp() - targets * logits[:, 0] + logits[:, 1].square()


ONE, WORDS = torch.tensor([0, 1, 2, 7, -1, 300]), torch.tensor([[0, 1], [2, 255], [1, 0]])
# name: (losses, the shape of logits, targets)
TAKEN = {
    "counts": (negative_binomial, (6, 2), ONE.abs()),
    "integers of a regression": (lambda logits, targets: (logits[:, 0] - targets).square(), (6, 3), ONE),
    "grades above the thresholds": (ordinal, (6, 3), torch.tensor([0, 1, 2, 3, 3, 0])),
    "many labels": (many, (3, 4), torch.tensor([[0, 1, 1, 0]] * 3)),
    "counts for every output": (many, (3, 2), torch.tensor([[9, 1]] * 3)),
    "an ignored label of one's own": (nn.CrossEntropyLoss(reduction="none", ignore_index=-1), (3, 3), torch.tensor([0, -1, 2])),
    "tokens, some left out": (per_position, (3, 3, 2), WORDS),
    "tokens of another length": (per_position, (3, 3, 5), WORDS),
    "classes last": (lambda logits, targets: per_position(logits.movedim(-1, 1), targets), (3, 2, 3), WORDS),
    "classes last, of another length": (lambda logits, targets: per_position(logits.movedim(-1, 1), targets), (3, 1, 3), WORDS),
    "a column": (
        lambda logits, targets: F.cross_entropy(logits, targets[:, 0], reduction="none", ignore_index=9),
        (2, 3),
        torch.tensor([[1], [9]]),
    ),
    "one logit": (lambda logits, targets: many(logits, targets[:, None]), (6, 1), ONE),
    "flags": (many, (3, 2), torch.tensor([[True, False]] * 3)),
    "float64 weights": (nn.CrossEntropyLoss(torch.ones(3).double(), reduction="none", ignore_index=9), (2, 3), torch.tensor([1, 9])),
    "small integers": (
        lambda logits, targets: F.cross_entropy(logits, targets.long(), reduction="none"),
        (3, 3),
        torch.tensor([0, 1, 2]).byte(),
    ),
    "a loss that draws": (lambda logits, targets: negative_binomial(logits + torch.randn_like(logits), targets), (6, 2), ONE.abs()),
    "a loss that asks for gradients": (
        lambda logits, targets: torch.autograd.grad(negative_binomial(logits, targets).sum(), logits)[0].sum(1),
        (6, 2),
        ONE.abs(),
    ),
    "no tensor": (lambda logits, targets: targets, (6, 2), (ONE,)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_targets_that_a_loss_takes_are_left_to_it(name):
    losses, logits, targets = TAKEN[name]
    state = torch.get_rng_state()
    for _ in range(2):
        with torch.no_grad():
            check_taken(losses, torch.Size(logits), targets)
    assert torch.equal(state, torch.get_rng_state())


REFUSED = {
    "beside an ignored one": (nn.CrossEntropyLoss(reduction="none", ignore_index=-1), (4, 3), torch.tensor([0, -1, 2, 5]), 5),
    "below zero": (nn.CrossEntropyLoss(reduction="none"), (3, 3), torch.tensor([0, -1, 2]), -1),
    "among tokens": (per_position, (3, 3, 2), torch.where(WORDS == 0, 4, WORDS), 4),
    "in a column": (lambda logits, targets: F.cross_entropy(logits, targets[:, 0], reduction="none"), (2, 3), torch.tensor([[1], [9]]), 9),
    "many of them": (nn.CrossEntropyLoss(reduction="none"), (100, 3), torch.arange(100), 3),
    "int32": (lambda logits, targets: F.cross_entropy(logits, targets.long(), reduction="none"), (2, 3), torch.tensor([0, 3]).int(), 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_labels_that_a_loss_does_not_take_are_named(name):
    losses, logits, targets, label = REFUSED[name]
    with pytest.raises(InputError, match=rf"^batches: labels must be in \[0, 3\), the outputs of the head; found {label}$"):
        check_taken(losses, torch.Size(logits), targets)


def test_a_loss_is_asked_once_for_each_value():
    asked = []

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        asked.append(targets)
        return negative_binomial(logits, targets)

    for _ in range(5):
        check_taken(losses, torch.Size((6, 2)), torch.tensor([5, 5, 9, 0, 1, 5]))
    assert len(asked) == 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16])
@pytest.mark.parametrize("name", ["a module", "a lambda", "its own"])
def test_labels_may_be_integers_of_any_size(name, dtype):
    objective = Objective(losses=ENTROPIES[name]) if name in ENTROPIES else Objective()
    whole, small = (LABELS, LABELS.to(dtype))
    for method in CASES:
        if name == "its own" or method in ("finetune", "fisher-mask", "random-labels"):
            outcomes = [
                unlearn(cases.model(), (IMAGES[FEW], labels[FEW]), (IMAGES[MANY], labels[MANY]), CASES[method](), objective=objective)
                for labels in (whole, small)
            ]
            properties.assert_same_weights(*(outcome.model.state_dict() for outcome in outcomes))
    assert metrics.accuracy(cases.model(), (IMAGES, small)) == metrics.accuracy(cases.model(), (IMAGES, whole))


def test_bytes_are_not_taken_for_ignored_positions():
    model, labels = nn.Linear(2, 200), torch.full((4,), 156, dtype=torch.uint8)  # 156 is -100 as a signed byte
    objective = Objective(targets=lambda batch: batch[1])
    assert metrics.logits(model, (torch.ones(4, 2), labels), objective).labels.tolist() == [156] * 4


FORMS = {
    "a column": (LABELS[:, None], r"a column of labels: give labels\.squeeze\(1\)\)"),
    "a column of fractions": (LABELS[:, None].float(), r"a column of labels: give labels\.squeeze\(1\)\.long\(\)"),
    "fractions": (LABELS.float(), r"labels as fractions: give labels\.long\(\)"),
    "one-hot": (F.one_hot(LABELS, 3), r"one-hot labels: give labels\.argmax\(1\)"),
}


def test_labels_are_not_complex_numbers():
    with pytest.raises(InputError, match="^forget: targets must be integer labels .*found torch.complex64"):
        unlearn(cases.model(), (IMAGES[FEW], LABELS[FEW].to(torch.complex64)), method=GradientAscent(QUICK))


@pytest.mark.parametrize("name", FORMS)
def test_labels_of_other_forms_are_named_with_what_to_do(name):
    labels, message = FORMS[name]
    with pytest.raises(InputError, match=f"^forget: targets must be integer labels .*{message}"):
        unlearn(cases.model(), (IMAGES[FEW], labels[FEW]), method=GradientAscent(QUICK))
    with pytest.raises(InputError, match=f"^data: accuracy needs one integer label .*{message}"):
        metrics.accuracy(cases.model(), (IMAGES, labels))


@pytest.mark.parametrize(
    "losses, message",
    [
        (nn.CrossEntropyLoss(), r"must return one loss a sample, shape \(16,\), as torch's losses do with reduction='none'; found \(\)"),
        (lambda logits, targets: 1.0, "must return one loss a sample.*found float"),
        (lambda logits, targets: {}["a"], "must take the logits and the targets, and raised KeyError: 'a'; found logits float32"),
        (lambda logits, targets: logits @ targets, "raised RuntimeError: .*; found logits float32 .* and targets int64"),
    ],
)
def test_losses_that_are_none_are_named(losses, message):
    with pytest.raises(InputError, match=f"^objective.losses: {message}|^objective.losses: .*{message}"):
        unlearn(cases.model(), cases.forget(), method=GradientAscent(QUICK), objective=Objective(losses=losses), watch={})
