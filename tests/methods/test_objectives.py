"""Every method with objectives of one's own: where it is right it works, where it would be silently wrong it is refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from expunge import fisher, metrics
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.methods import SSD, FisherMask, FisherNoise, MaskClassifier, NewtonNoise
from expunge.unlearning import unlearn
from tests.methods import cases, properties
from tests.methods.cases import CASES

LABELS = torch.arange(48) % 3
WORDS = torch.randint(6, (48, 4), generator=torch.Generator().manual_seed(1))
NEED_LABELS = {"tf-idf-mask", "mask-classifier", "random-labels", "salun", "potion", "mu-mis"}
NEED_SOFTMAX = {
    "bad-teacher",
    "scrub",
    "lotus",
    "reset-and-distil",
    "fisher-noise",
    "newton-noise",
}  # the last two by their kind, "expected"


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").sum(1)


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).square().sum(1)


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    own = logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    return -((1 - own.exp()) ** 2) * own


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.log_softmax(1)).sum(1)


def one_against_all(logits: Tensor, targets: Tensor) -> Tensor:
    return binary(logits, F.one_hot(targets, logits.shape[1]))


class Tokens(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).sum(1)


TOKENS = Tokens(ignore_index=255, reduction="none")
NOT_OF_TOKENS = {"tf-idf-mask", "mask-classifier", "mu-mis", "fisher-noise", "newton-noise"}


def classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    return TOKENS(logits.movedim(-1, 1), targets)


class Tagger(nn.Module):
    """Six classes for each of four rows of an image."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(2)
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 6)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.hidden(x[:, 0]).relu())
        return logits if self.last else logits.movedim(-1, 1)


MANY = torch.stack([LABELS == 0, LABELS != 1, LABELS == 2], 1)
SOFT = F.one_hot(LABELS, 3) * 0.7 + 0.1
FOCAL = Objective(losses=focal, classes=True)
REGRESSION = torch.stack([LABELS, LABELS - 1, LABELS * 0.5], 1)
# name: (objective, targets, model, the methods that are refused)
OBJECTIVES = {
    "focal loss": (FOCAL, LABELS, cases.model, set()),
    "focal loss, not said": (Objective(losses=focal), LABELS, cases.model, NEED_SOFTMAX | {"random-labels", "salun", "potion", "mu-mis"}),
    "one against all": (Objective(losses=one_against_all, classes=True), LABELS, cases.model, set()),
    "soft labels": (Objective(losses=soft_cross_entropy, classes=True), SOFT, cases.model, NEED_LABELS),
    "many labels": (Objective(losses=binary, classes=False), MANY.float(), cases.model, NEED_LABELS | NEED_SOFTMAX),
    "many labels, integers": (Objective(losses=binary, classes=False), MANY.long(), cases.model, NEED_LABELS | NEED_SOFTMAX),
    "many labels, not said": (Objective(losses=binary), MANY.long(), cases.model, NEED_LABELS | NEED_SOFTMAX),
    "regression": (Objective(losses=squared, classes=False), REGRESSION, cases.model, NEED_LABELS | NEED_SOFTMAX),
    "tokens": (Objective(losses=TOKENS, classes=True), WORDS, lambda: Tagger(last=False), NOT_OF_TOKENS),
    "tokens, classes last": (Objective(losses=classes_last, classes=False), WORDS, lambda: Tagger(last=True), NEED_LABELS | NEED_SOFTMAX),
}


def parts(targets: Tensor) -> tuple[Subset, Subset]:
    data = TensorDataset(cases.dataset().tensors[0], targets)
    return Subset(data, [row for row in range(48) if row % 3 == 0]), Subset(data, [row for row in range(48) if row % 3 != 0])


def unlearnt(name: str, method) -> nn.Module:
    objective, targets, model, _ = OBJECTIVES[name]
    before = model()
    with properties.assert_untouched(before):
        return unlearn(before, *parts(targets), method, objective=objective, watch={}).model


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_methods_work_or_refuse(name, method):
    if method in OBJECTIVES[name][-1]:
        with pytest.raises(InputError, match="^(objective|forget|label|kind): "):
            unlearnt(name, CASES[method]())
    else:
        properties.assert_finite(unlearnt(name, CASES[method]()))


KINDS = {
    "expected": lambda kind: FisherMask(0.1, kind, tuning=None),
    "sampled": lambda kind: FisherNoise(kind=kind, tuning=None),
    "batch": lambda kind: FisherMask.as_released(0.1, tuning=None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["many labels", "many labels, integers", "regression", "focal loss, not said"])
def test_kinds_of_the_models_own_distribution_need_classes(name, kind):
    objective, targets, model, _ = OBJECTIVES[name]
    message = rf'^objective: the kind "{kind}" \(unlike "empirical"\) needs class logits; give Objective\(losses=..., classes=True\)'
    with pytest.raises(InputError, match=message):
        unlearnt(name, KINDS[kind](kind))
    with pytest.raises(InputError, match=message):
        fisher.diagonal(model(), parts(targets)[0], kind=kind, objective=objective)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_the_models_own_distribution_do_not_ask_the_losses(kind):
    data = parts(LABELS)[0]
    first, second = (fisher.diagonal(cases.model(), data, kind=kind, objective=each) for each in (Objective(), FOCAL))
    assert all(torch.equal(found, second.sums[name]) for name, found in first.sums.items())
    assert bool(first.sums["0.weight"].any())


@pytest.mark.parametrize("method", [FisherNoise(kind="empirical", tuning=None), NewtonNoise(kind="empirical"), SSD(1.0), FisherMask(0.1)])
@pytest.mark.parametrize("name", ["many labels", "regression", "tokens, classes last"])
def test_the_empirical_kind_takes_any_loss(name, method):
    properties.assert_finite(unlearnt(name, method))


def test_a_teacher_teaches_the_same_whatever_the_loss_of_the_classes():
    weights = [unlearnt(name, CASES["bad-teacher"]()).state_dict() for name in ("focal loss", "one against all", "soft labels")]
    properties.assert_same_weights(weights[0], weights[1])
    properties.assert_same_weights(weights[0], weights[2])


@pytest.mark.parametrize("method", ["bad-teacher", "scrub", "lotus", "random-labels", "salun", "mu-mis"])
@pytest.mark.parametrize("classes", [None, False])
def test_counts_are_no_classes(method, classes):
    counts = torch.where(LABELS == 0, 0, 7)  # of which the forget data hold zeros alone
    objective = Objective(losses=lambda logits, targets: logits[:, 0].exp() - targets * logits[:, 0], classes=classes)
    with pytest.raises(InputError, match="^objective: .* needs? class logits"):
        unlearn(cases.model(), *parts(counts), CASES[method](), objective=objective, watch={})


@pytest.mark.parametrize("method", ["random-labels", "salun"])
def test_positions_left_out_by_another_number_get_no_random_label(method):
    objective = OBJECTIVES["tokens"][0]
    with pytest.raises(InputError, match=r"^forget: random labels need labels in \[0, 6\), or -100 where none counts; found 255"):
        unlearn(Tagger(False), *parts(torch.where(WORDS == 0, 255, WORDS)), CASES[method](), objective=objective, watch={})


@pytest.mark.parametrize("targets", [torch.ones(48, 3), torch.ones(48, 3, dtype=torch.int64), torch.full((48,), 1.7)])
def test_numbers_are_no_label_of_the_classifier(targets):
    objective = Objective(losses=lambda logits, targets: (logits - targets.reshape(48 // 3, -1)).square().sum(1), classes=False)
    forget = parts(targets)[0]
    with pytest.raises(InputError, match="^label: must be given where the forget set holds no integer labels; found torch"):
        unlearn(cases.model(), forget, method=MaskClassifier(), objective=objective, watch={})
    assert len(unlearn(cases.model(), forget, method=MaskClassifier(1), objective=objective, watch={}).edit)


def test_ignored_positions_are_no_label_of_the_classifier():
    words = torch.where(WORDS < 3, -100, 4)
    patch = unlearn(Tagger(False), parts(words)[0], method=MaskClassifier(), watch={}).edit
    assert patch.mask(Tagger(False))["head.bias"].tolist() == [False] * 4 + [True, False]


def test_no_row_is_redrawn_for_many_labels():
    many = torch.zeros(48, 3, dtype=torch.int64)
    many[::3] = 1  # a label 1 would be one of the forget data alone
    method = FisherNoise(0.0, "empirical", "released", tuning=None)
    changed = unlearn(cases.model(), *parts(many), method, objective=Objective(losses=binary, classes=False), watch={}).model
    properties.assert_same_weights(changed.state_dict(), cases.model().state_dict())


def test_accuracies_need_classes_at_dimension_one():
    model = Tagger(last=True)
    square = TensorDataset(cases.dataset().tensors[0].repeat(1, 1, 2, 1)[:, :, :6], torch.zeros(48, 6, dtype=torch.int64))
    for classes in (None, False):
        objective = Objective(losses=classes_last, classes=classes)
        with pytest.raises(InputError, match="^objective: accuracy needs class logits; .* where dimension 1 of the outputs is the classes"):
            metrics.accuracy(model, square, objective)
        with pytest.raises(InputError, match=r"^watch\['seen'\]: accuracy needs class logits; .*watch=\{\} measures no accuracy"):
            unlearn(model, square, method=FisherMask(tuning=None), objective=objective, watch={"seen": square})
    with pytest.raises(InputError, match=r"^forget: accuracy needs class logits; .*watch=\{\} measures no accuracy"):
        unlearn(model, square, method=FisherMask(tuning=None), objective=Objective(losses=classes_last))
    unwatched = unlearn(model, square, method=FisherMask(tuning=None), objective=Objective(losses=classes_last, classes=False))
    assert unwatched.history[0].accuracies == {}
    with pytest.raises(InputError, match=r"^data: accuracy needs one integer label .* for logits \(48, 4, 6\)"):
        metrics.accuracy(model, (cases.dataset().tensors[0], WORDS), Objective(losses=classes_last, classes=True))
    turned = Objective(outputs=lambda model, batch: model(batch[0]).movedim(-1, 1), losses=TOKENS, classes=True)
    assert metrics.accuracy(model, square, turned) == metrics.accuracy_of(metrics.logits(model, square, turned))


def test_a_single_logit_has_no_accuracy():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(5, 1, 4, 4), torch.zeros(5, dtype=torch.int64))  # all of them "right", whatever the logit
    objective = Objective(losses=lambda logits, targets: binary(logits, targets[:, None]), classes=False)
    with pytest.raises(InputError, match=r"^logits: .* K classes, two or more; found shape \(5, 1\)"):
        metrics.accuracy(model, data, objective)
    with pytest.raises(InputError, match="two or more"):
        metrics.accuracy_of(metrics.logits(model, data, objective))
    assert metrics.mean_loss(metrics.logits(model, data, objective), objective) > 0
