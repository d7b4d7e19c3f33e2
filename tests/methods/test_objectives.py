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
NEED_LABELS = {"tf-idf-mask", "mask-classifier", "random-labels", "salun"}
NEED_SOFTMAX = {"bad-teacher", "scrub", "fisher-noise", "newton-noise"}  # the last two by their kind, "expected"


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


def tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=255).sum(1)


def classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    return tokens(logits.movedim(-1, 1), targets)


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
# name: (losses, targets, model, the methods that are refused)
OBJECTIVES = {
    "focal loss": (focal, LABELS, cases.model, set()),
    "one against all": (one_against_all, LABELS, cases.model, set()),
    "soft labels": (soft_cross_entropy, SOFT, cases.model, NEED_LABELS),
    "many labels": (binary, MANY.float(), cases.model, NEED_LABELS | NEED_SOFTMAX),
    "many labels, integers": (binary, MANY.long(), cases.model, NEED_LABELS | NEED_SOFTMAX),
    "regression": (squared, torch.stack([LABELS, LABELS - 1, LABELS * 0.5], 1), cases.model, NEED_LABELS | NEED_SOFTMAX),
    "tokens": (tokens, WORDS, lambda: Tagger(last=False), {"tf-idf-mask", "mask-classifier", "fisher-noise", "newton-noise"}),
    "tokens, classes last": (classes_last, WORDS, lambda: Tagger(last=True), NEED_LABELS | NEED_SOFTMAX),
}


def parts(targets: Tensor) -> tuple[Subset, Subset]:
    data = TensorDataset(cases.dataset().tensors[0], targets)
    return Subset(data, [row for row in range(48) if row % 3 == 0]), Subset(data, [row for row in range(48) if row % 3 != 0])


def unlearnt(name: str, method) -> nn.Module:
    losses, targets, model, _ = OBJECTIVES[name]
    before = model()
    with properties.assert_untouched(before):
        return unlearn(before, *parts(targets), method, objective=Objective(losses=losses), watch={}).model


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
@pytest.mark.parametrize("name", ["many labels", "many labels, integers", "regression"])
def test_kinds_of_the_models_own_distribution_need_classes(name, kind):
    losses, targets, model, _ = OBJECTIVES[name]
    message = rf'^objective: the kind "{kind}" \(unlike "empirical"\) needs classes: integer labels'
    with pytest.raises(InputError, match=message):
        unlearnt(name, KINDS[kind](kind))
    with pytest.raises(InputError, match=message):
        fisher.diagonal(model(), parts(targets)[0], kind=kind, objective=Objective(losses=losses))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_the_models_own_distribution_do_not_ask_the_losses(kind):
    data = parts(LABELS)[0]
    first, second = (fisher.diagonal(cases.model(), data, kind=kind, objective=each) for each in (Objective(), Objective(losses=focal)))
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


@pytest.mark.parametrize("method", ["bad-teacher", "scrub", "random-labels", "salun"])
def test_remain_data_tell_counts_from_classes(method):
    counts = torch.where(LABELS == 0, 0, 7)  # of which the forget data hold zeros alone
    objective = Objective(losses=lambda logits, targets: logits[:, 0].exp() - targets * logits[:, 0])
    with pytest.raises(InputError, match="^objective: .* needs? classes"):
        unlearn(cases.model(), *parts(counts), CASES[method](), objective=objective, watch={})


@pytest.mark.parametrize("method", ["random-labels", "salun"])
def test_positions_left_out_by_another_number_get_no_random_label(method):
    with pytest.raises(InputError, match=r"^forget: random labels need labels in \[0, 6\), or -100 where none counts; found 255"):
        unlearn(Tagger(False), *parts(torch.where(WORDS == 0, 255, WORDS)), CASES[method](), objective=Objective(losses=tokens), watch={})


@pytest.mark.parametrize("targets", [torch.ones(48, 3), torch.ones(48, 3, dtype=torch.int64), torch.full((48,), 1.7)])
def test_numbers_are_no_label_of_the_classifier(targets):
    objective = Objective(losses=lambda logits, targets: (logits - targets.reshape(48 // 3, -1)).square().sum(1))
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
    changed = unlearn(cases.model(), *parts(many), method, objective=Objective(losses=binary), watch={}).model
    properties.assert_same_weights(changed.state_dict(), cases.model().state_dict())


def test_accuracies_need_classes_at_dimension_one():
    model, objective = Tagger(last=True), Objective(losses=classes_last)
    square = TensorDataset(cases.dataset().tensors[0].repeat(1, 1, 2, 1)[:, :, :6], torch.zeros(48, 6, dtype=torch.int64))
    with pytest.raises(InputError, match="^objective: accuracy needs the classes at dimension 1"):
        metrics.accuracy(model, square, objective)
    with pytest.raises(InputError, match=r"^forget: accuracy needs the classes at dimension 1 .*watch=\{\} measures no accuracy"):
        unlearn(model, square, method=FisherMask(tuning=None), objective=objective)
    turned = Objective(outputs=lambda model, batch: model(batch[0]).movedim(-1, 1), losses=tokens)
    assert metrics.accuracy(model, square, turned) == metrics.accuracy_of(metrics.logits(model, square, turned))


def test_a_single_logit_has_no_accuracy():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(5, 1, 4, 4), torch.zeros(5, dtype=torch.int64))  # all of them "right", whatever the logit
    objective = Objective(losses=lambda logits, targets: binary(logits, targets[:, None]))
    with pytest.raises(InputError, match=r"^logits: .* K classes, two or more; found shape \(5, 1\)"):
        metrics.accuracy(model, data, objective)
    with pytest.raises(InputError, match="two or more"):
        metrics.accuracy_of(metrics.logits(model, data, objective))
    assert metrics.mean_loss(metrics.logits(model, data, objective), objective) > 0
