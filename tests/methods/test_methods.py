"""What is particular to each method."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm

from expunge import fisher
from expunge.data.objective import Objective
from expunge.editing import masks, scores
from expunge.errors import InputError, ModelError, NoEffectWarning
from expunge.methods import ActivationMask, BadTeacher, Finetune, FisherMask, MaskClassifier, RandomMask, Retrain
from expunge.training.loop import train
from expunge.training.schedules import Steps
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests.methods import cases, properties

HEAD = {"7.weight", "7.bias"}


def trained() -> nn.Module:
    model = cases.model()
    train(model, cases.dataset(), cases.LONGER)
    return model


def test_fisher_mask_zeroes_the_top_of_the_difference_of_sums():
    model = trained()
    outcome = unlearn(model, cases.forget(), cases.remain(), FisherMask(ratio=0.1, tuning=None))
    allowed = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in HEAD]
    forget = fisher.diagonal(model, [cases.dataset()[::3]])
    remain = fisher.diagonal(model, [cases.dataset()[torch.arange(48) % 3 != 0]])
    score = torch.cat([(forget.sums[name] - remain.sums[name]).flatten() for name in allowed])
    chosen = torch.cat([outcome.edit.mask(model)[name].flatten() for name in allowed])
    assert int(chosen.sum()) == round(0.1 * len(score)) == len(outcome.edit)
    assert score[chosen].min() >= score[~chosen].max()
    for name, parameter in outcome.model.named_parameters():
        part = outcome.edit.mask(model).get(name, torch.zeros_like(parameter, dtype=torch.bool))
        assert (parameter[part] == 0).all()
        assert torch.equal(parameter[~part], model.get_parameter(name)[~part])


def test_without_remain_data_the_forget_term_stands_alone():
    model = trained()
    outcome = unlearn(model, cases.forget(), method=FisherMask(ratio=0.1, tuning=None))
    forget = fisher.diagonal(model, [cases.dataset()[::3]])
    expected = masks.select(scores.fisher_difference(forget), 0.1, candidates=masks.candidates(model, tuple(HEAD), which="all"))
    properties.assert_same_weights(outcome.edit.mask(model), expected)
    assert [(record.epoch, set(record.accuracies)) for record in outcome.history] == [(None, {"forget"}), (0, {"forget"})]
    assert outcome.history[1].unlearn_score is None


@pytest.mark.parametrize("include_head", [True, False])
@pytest.mark.parametrize("method", [FisherMask, RandomMask])
def test_the_head_is_masked_only_when_included(method, include_head):
    outcome = unlearn(trained(), cases.forget(), cases.remain(), method(ratio=0.5, include_head=include_head, tuning=None))
    assert (outcome.edit.edits.keys() & HEAD == HEAD) == include_head


def test_which_weights_leaves_vectors_alone():
    outcome = unlearn(trained(), cases.forget(), cases.remain(), FisherMask(ratio=0.5, which="weights", tuning=None))
    assert set(outcome.edit.edits) == {"0.weight", "5.weight"}


def test_as_released_masks_whole_kernels_and_the_head_by_batch_gradients():
    method = FisherMask.as_released(ratio=0.3, tuning=None)
    assert (method.kind, method.remain_weight, method.granularity, method.which, method.include_head) == (
        "batch",
        1,
        "kernel",
        "weights",
        True,
    )
    model = trained()
    mask = unlearn(model, cases.forget(), cases.remain(), method).edit.mask(model)
    assert set(mask) == {"0.weight", "5.weight", "7.weight"}
    assert set(mask["0.weight"].sum((2, 3)).flatten().tolist()) <= {0, 9}


def test_frozen_masks_stay_zero_and_free_ones_grow_back():
    for freeze in (True, False):
        tuning = dataclasses.replace(cases.QUICK, freeze=freeze)
        model = trained()
        outcome = unlearn(model, cases.forget(), cases.remain(), RandomMask(ratio=0.3, tuning=tuning))
        mask = outcome.edit.mask(model)
        assert all((outcome.model.get_parameter(name)[part] == 0).all() for name, part in mask.items()) == freeze


def test_random_masks_differ_by_seed():
    model = trained()
    first, second = (unlearn(model, cases.forget(), method=RandomMask(0.2, seed=seed, tuning=None)).edit for seed in (0, 1))
    assert len(first) == len(second)
    assert any(not torch.equal(first.mask(model)[name], second.mask(model)[name]) for name in first.edits)


def test_mask_classifier_zeroes_one_row():
    model = trained()
    outcome = unlearn(model, cases.forget(), cases.remain(), MaskClassifier())
    assert (outcome.model[7].weight[0] == 0).all() and outcome.model[7].bias[0] == 0
    assert torch.equal(outcome.model[7].weight[1:], model[7].weight[1:])
    assert torch.equal(outcome.model[5].weight, model[5].weight)
    assert (unlearn(model, cases.forget(), method=MaskClassifier(label=2)).model[7].weight[2] == 0).all()


def test_mask_classifier_needs_one_label():
    with pytest.raises(InputError, match=r"label: .*several labels; found \[1, 2\]"):
        unlearn(cases.model(), cases.remain(), method=MaskClassifier())
    with pytest.raises(InputError, match=r"label: must be in \[0, 3\); found 3"):
        unlearn(cases.model(), cases.forget(), method=MaskClassifier(label=3))


def test_finetune_is_training_on_the_remain_data():
    outcome = unlearn(trained(), cases.forget(), cases.remain(), Finetune(cases.QUICK))
    by_hand = trained()
    train(by_hand, cases.remain(), cases.QUICK)
    properties.assert_same_weights(outcome.model.state_dict(), by_hand.state_dict())
    assert outcome.edit is None


def test_retrain_starts_from_fresh_weights_and_statistics():
    first = unlearn(trained(), cases.forget(), cases.remain(), Retrain(cases.QUICK), watch={}).model
    second = unlearn(cases.model(), cases.forget(), cases.remain(), Retrain(cases.QUICK)).model
    properties.assert_same_weights(first.state_dict(), second.state_dict())
    assert Retrain().tuning == Tuning(schedule=Steps())


def test_retrain_keeps_modules_that_are_frozen_as_a_whole():
    model = trained()
    model[0].requires_grad_(False)
    outcome = unlearn(model, cases.forget(), cases.remain(), Retrain(cases.QUICK), watch={})
    assert torch.equal(outcome.model[0].weight, model[0].weight)
    assert not torch.equal(outcome.model[5].weight, model[5].weight)


def test_retrain_takes_fresh_weights_from_a_builder():
    outcome = unlearn(trained(), cases.forget(), cases.remain(), Retrain(cases.QUICK, fresh=cases.model), watch={})
    by_hand = cases.model()
    train(by_hand, cases.remain(), cases.QUICK)
    properties.assert_same_weights(outcome.model.state_dict(), by_hand.state_dict())
    with pytest.raises(InputError, match="^fresh: "):
        unlearn(trained(), cases.forget(), cases.remain(), Retrain(cases.QUICK, fresh=lambda: nn.Linear(2, 2)))


class Scaled(nn.Module):
    """A parameter of its own, and no way to draw it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(x.flatten(1) * self.scale)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x):
        return self.inner(x)


def test_retrain_names_modules_it_cannot_reset():
    with pytest.raises(ModelError, match="reset_parameters .* missing in inner"):
        unlearn(Wrapped(), cases.forget(), cases.remain(), Retrain(cases.QUICK))
    outcome = unlearn(Wrapped(), cases.forget(), cases.remain(), Retrain(cases.QUICK, fresh=Wrapped))
    properties.assert_finite(outcome.model)


def test_an_objective_of_ones_own_reaches_every_part():
    calls = []

    def losses(logits, targets):
        calls.append(len(targets))
        return nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)

    unlearn(
        cases.model(), cases.forget(), cases.remain(), FisherMask(0.1, tuning=cases.QUICK), objective=Objective(losses=losses, classes=True)
    )
    assert sum(calls) >= 16 + 32 + 2 * 32


class Halved(nn.Module):
    """Its reset reads what was learnt."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def reset_parameters(self):
        self.scale.data.mul_(0.5)

    def forward(self, x):
        return self.scale * x.flatten(1)


KEPT = {
    "pruned": ("0.weight_orig", lambda model: prune.l1_unstructured(model[0], "weight", 0.3)),
    "spectral norm": ("7.weight_orig", lambda model: spectral_norm(model[7])),
    "own reset": ("4.0.scale", lambda model: model.__setitem__(4, nn.Sequential(Halved()))),
}


@pytest.mark.parametrize("method", [Retrain(cases.QUICK), BadTeacher(tuning=cases.QUICK)])
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_weights_that_a_reset_does_not_reach_are_refused(kind, method):
    name, change = KEPT[kind]
    model = cases.model()
    change(model)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        model.eval()(cases.dataset()[:2][0])
    with properties.assert_untouched(model), pytest.raises(ModelError, match=f"does not reach {name}"):
        unlearn(model, cases.forget(), cases.remain(), method, watch={})


def test_masks_as_released_round_down():
    """As `int(n * ratio)` in the programs; the text's reading rounds to the nearest."""
    model, channels = cases.model(), 4 + 8  # of the convolution and the hidden layer; 3 more are the classifier's
    kernels = 4 + 64 * 8 + 8 * 3
    for method, units in ((ActivationMask, channels), (RandomMask, channels + 3), (FisherMask, kernels)):
        ratio = (1 + 0.9) / units
        outcome = unlearn(model, cases.forget(), cases.remain(), method.as_released(ratio, tuning=None))
        nearest = unlearn(model, cases.forget(), cases.remain(), method.as_released(ratio, tuning=None, rounding="nearest"))
        assert 0 < len(outcome.edit) < len(nearest.edit)
        assert method().rounding == "nearest" and method.as_released().rounding == "down"
        with pytest.raises(InputError, match="^rounding: must be one of"):
            method(rounding="up")


@pytest.mark.parametrize("tuning", [None, cases.QUICK])
def test_a_mask_of_weights_that_are_zero_already_changes_nothing_and_says_so_once(tuning):
    model = cases.model()
    nn.init.zeros_(model[7].weight)
    nn.init.zeros_(model[7].bias)
    with pytest.warns(NoEffectWarning, match="all 9 weights it names are zero already") as caught:
        unlearn(model, cases.forget(), cases.remain(), MaskClassifier(0, tuning=tuning))
    assert len(caught) == 1
