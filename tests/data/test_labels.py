"""Labels must be outputs of the head, whatever the loss is called; targets of no classes are left to the loss."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge import fisher, metrics
from expunge.curvature import gradient
from expunge.data.batches import as_batches
from expunge.data.labels import has_label
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.methods import Finetune, GradientAscent
from expunge.metrics import Predictions, accuracy_of
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
    model, objective = cases.model(), Objective(losses=ENTROPIES[name], classes=True)
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
    objective = Objective(losses=ENTROPIES[name], classes=True)
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


@pytest.mark.parametrize("name", ENTROPIES)
def test_a_label_outside_the_head_is_named_where_nobody_said_what_the_outputs_are(name):
    objective = Objective(losses=ENTROPIES[name])
    message = r"labels must be in \[0, 3\), the outputs of the head, or Objective\(classes=False\) says .*; found 7"
    for call in (
        lambda: fisher.diagonal(cases.model(), (IMAGES, WRONG), objective=objective),
        lambda: train(cases.model(), (IMAGES, WRONG), QUICK, objective),
        lambda: unlearn(cases.model(), (IMAGES[FEW], WRONG[FEW]), method=GradientAscent(QUICK), objective=objective, watch={}),
    ):
        with pytest.raises(InputError, match=message):
            call()
    properties.assert_finite(
        unlearn(cases.model(), (IMAGES[FEW], LABELS[FEW]), method=GradientAscent(QUICK), objective=objective, watch={}).model
    )


def any_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.flatten(1).sum(1)


ONE, WORDS = torch.tensor([0, 1, 2, 7, -1, 300]), torch.tensor([[0, 1], [2, 255], [1, 0]])
# name: (the shape of logits, targets) that no loss was said to take
NO_CLASSES = {
    "counts": ((6, 2), ONE.abs()),
    "grades above the thresholds": ((6, 3), torch.tensor([0, 1, 2, 3, 3, 0])),
    "counts for every output": ((3, 2), torch.tensor([[9, 1]] * 3)),
    "classes last": ((3, 2, 9), torch.tensor([[8, 1]] * 3)),
    "one logit": ((6, 1), ONE),
    "flat": ((6,), ONE),
    "flags": ((3, 2), torch.tensor([[True, False]] * 3)),
    "numbers": ((6, 3), ONE.double()),
    "no tensor": ((6, 2), (ONE,)),
}


@pytest.mark.parametrize("name", NO_CLASSES)
def test_targets_are_left_to_a_loss_that_is_not_of_classes(name):
    logits, targets = NO_CLASSES[name]
    Objective(losses=any_loss, classes=False).check_targets(torch.Size(logits), targets)


@pytest.mark.parametrize("name", ["counts for every output", "one logit", "flat", "flags", "numbers", "no tensor"])
def test_targets_that_cannot_be_labels_are_left_to_a_loss_that_does_not_say(name):
    logits, targets = NO_CLASSES[name]
    Objective(losses=any_loss).check_targets(torch.Size(logits), targets)


@pytest.mark.parametrize("name", ["counts", "grades above the thresholds", "classes last"])
def test_integers_that_may_be_labels_must_be_said_to_be_none(name):
    logits, targets = NO_CLASSES[name]
    with pytest.raises(InputError, match=rf"^batches: labels must be in \[0, {logits[1]}\), .*Objective\(classes=False\)"):
        Objective(losses=any_loss).check_targets(torch.Size(logits), targets)


class Ignoring(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).flatten(1).sum(1)


@pytest.mark.parametrize("classes", [True, None])
def test_a_loss_may_leave_out_a_label_of_its_own(classes):
    positions = Objective(losses=Ignoring(ignore_index=255, reduction="none"), classes=classes)
    assert positions.per_sample(torch.zeros(3, 3, 2), WORDS).shape == (3,)
    with pytest.raises(InputError, match=r"^batches: labels must be in \[0, 3\), .*; found 4"):
        positions.per_sample(torch.zeros(3, 3, 2), torch.where(WORDS == 0, 4, WORDS))
    single = Objective(losses=nn.CrossEntropyLoss(reduction="none", ignore_index=-1), classes=classes)
    assert single.per_sample(torch.zeros(3, 3), torch.tensor([0, -1, 2])).tolist()[1] == 0
    for labels, label in ((torch.tensor([0, -1, 5]), 5), (torch.tensor([0, -2, 2]), -2), (torch.tensor([0, 3, 1]).int(), 3)):
        with pytest.raises(InputError, match=rf"labels must be in \[0, 3\), .*; found {label}$"):
            single.per_sample(torch.zeros(3, 3), labels)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16])
@pytest.mark.parametrize("name", ["a module", "a lambda", "its own"])
def test_labels_may_be_integers_of_any_size(name, dtype):
    objective = Objective(losses=ENTROPIES[name], classes=True) if name in ENTROPIES else Objective()
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


def test_labels_of_tokens_without_their_objective_are_told_which_to_give():
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    ids = torch.arange(12).reshape(3, 4) % 9
    with pytest.raises(InputError, match="a label per token: give the objective TOKENS, or NEXT_TOKENS"):
        fisher.diagonal(words, [(ids, ids)])


@pytest.mark.parametrize(
    "losses, message",
    [
        (nn.CrossEntropyLoss(), r"must return one loss per sample, shape \(16,\), as torch's losses do with reduction='none'; found \(\)"),
        (lambda logits, targets: 1.0, "must return one loss per sample.*found float"),
        (lambda logits, targets: {}["a"], "must take the logits and the targets, and raised KeyError: 'a'; found logits float32"),
        (lambda logits, targets: logits @ targets, "raised RuntimeError: .*; found logits float32 .* and targets int64"),
    ],
)
def test_losses_that_are_none_are_named(losses, message):
    with pytest.raises(InputError, match=f"^objective.losses: {message}|^objective.losses: .*{message}"):
        unlearn(cases.model(), cases.forget(), method=GradientAscent(QUICK), objective=Objective(losses=losses), watch={})


def test_a_byte_that_is_the_ignored_label_by_its_bits_counts():
    """156 − 256 is −100, and torch compares bytes with that."""
    labels = torch.tensor([0, 156, 200])
    for kind in (torch.uint8, torch.int16, torch.int64):
        assert has_label(labels.to(kind)).all()
    assert has_label(torch.tensor([-100, 3])).tolist() == [False, True]
    logits = torch.eye(201)[labels]
    assert accuracy_of(Predictions(logits, labels.byte())) == 1 and accuracy_of(Predictions(-logits, labels.byte())) == 0


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (torch.tensor([[0.5, 0.5, 0.0], [120.0, -3.0, 7.0]]), "-3"),
        (torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), "a sum of 2"),
        (torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), "a sum of 0"),
        (torch.tensor([[float("nan"), 0.0, 1.0], [0.0, 1.0, 0.0]]), "nan"),
    ],
    ids=["numbers", "several labels", "none", "not a number"],
)
def test_numbers_that_are_no_probabilities_are_not_taken_for_them(targets, found):
    model, batch = nn.Linear(4, 3), (torch.randn(2, 4), targets)
    for call in (fisher.diagonal, partial(train, tuning=QUICK)):
        with pytest.raises(InputError, match=rf"must be probabilities.*found {found}|must be finite"):
            call(model, batch)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_probabilities_may_be_rounded(kind):
    probabilities = torch.randn(6, 3).softmax(1).to(kind).float()
    assert fisher.diagonal(nn.Linear(4, 3), (torch.randn(6, 4), probabilities)).count == 6
