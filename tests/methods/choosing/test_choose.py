"""Without a method one is chosen: what it is, that the goal holds, what is told, what is refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import expunge
from expunge import Choose, FisherMask, GoalNotMetWarning, ResetAndDistil, unlearn
from expunge.errors import DivergedError
from expunge.methods.choosing.judging import Verdict
from expunge.methods.choosing.rungs import Rung, left
from expunge.methods.resetting import ByFisher
from tests.methods import properties
from tests.methods.choosing.small import (
    CLASS,
    DATA,
    TEST,
    UNSEEN,
    Bare,
    HalfBare,
    accuracy,
    built,
    trained,
)


def test_a_class_is_forgotten_and_the_rest_kept(model):
    with properties.assert_untouched(model):
        outcome = unlearn(model, *CLASS, validation=UNSEEN)
    choice, kept = outcome.choice, Subset(TEST, torch.nonzero(TEST.tensors[1]).flatten().tolist())
    assert choice.goal_met is True and choice.missing == ()
    assert accuracy(outcome.model, CLASS[0]) == 0 and accuracy(outcome.model, kept) >= accuracy(model, kept) - 0.02
    assert isinstance(outcome.method, ResetAndDistil) and outcome.method.reset == ByFisher(0.6) and choice.method == repr(outcome.method)
    assert choice.reasons[0] == "the forget data are 1 class (0): no remain sample has the label"
    assert str(outcome).splitlines()[4].startswith("chose ResetAndDistil(ByFisher(0.6)), ") and str(outcome).endswith("goal met")
    assert all(len(line) <= 80 for line in str(outcome).splitlines())


def test_history_has_the_epochs_of_the_chosen_alone(model):
    """The second of two that were tried: the first fell too far."""
    outcome = unlearn(model, *CLASS, Choose(rate=1e-4), validation=UNSEEN)
    first, second = outcome.choice.tried
    assert first.accuracy < second.accuracy and "fell from" in first.result and second.result == "goal met"
    assert outcome.choice.label == second.method and outcome.method.reset == 0.35
    epochs = outcome.method.tuning.schedule.epochs
    assert [record.epoch for record in outcome.history] == [None, *range(epochs + 1)]
    assert outcome.history[-1].accuracies == {
        name: accuracy(outcome.model, data) for name, data in (("remain", CLASS[1]), ("forget", CLASS[0]))
    }
    seconds = [record.seconds for record in outcome.history]
    assert seconds == sorted(seconds) and seconds[-1] <= outcome.seconds
    assert len(outcome.edit) and all(
        torch.equal(edit.old, model.state_dict()[name].flatten()[edit.indices]) for name, edit in outcome.edit.edits.items()
    )


def test_bare_parameters_are_left_as_they_are():
    model = trained(DATA, HalfBare())
    outcome = unlearn(model, *CLASS, validation=UNSEEN)
    assert outcome.method.reset == ByFisher(0.6) and "first" not in outcome.edit.edits and len(outcome.choice.tried) == 1


def test_the_search_for_a_rate_is_shown(model, capsys):
    unlearn(model, *CLASS, validation=UNSEEN, progress=True)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("trying learning rates: 5 steps, ") and second.startswith("trying ResetAndDistil(ByFisher(0.6)), ")


def test_without_remain_data(model):
    with pytest.warns(GoalNotMetWarning, match="nothing is there to measure what became of the rest .*; .* still get their label"):
        outcome = unlearn(model, CLASS[0])
    assert isinstance(outcome.method, FisherMask) and outcome.method.ratio <= 0.005
    assert unlearn(model, Subset(DATA, [5])).choice.missing[1].startswith("whether the samples look unseen cannot be measured without `val")
    guarded = unlearn(model, CLASS[0], validation=UNSEEN)
    assert guarded.choice.goal_met is True and accuracy(guarded.model, CLASS[0]) <= 0.01
    kept = Subset(TEST, torch.nonzero(TEST.tensors[1]).flatten().tolist())
    assert accuracy(guarded.model, kept) >= accuracy(model, kept) - 0.04


def test_what_the_last_resort_cannot_work_on_is_no_reason_to_stop():
    """MuMis moves inputs, and token ids cannot be moved."""
    words = torch.randint(0, 6, (60, 4), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(words, words[:, 0] % 3)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = trained(data, nn.Sequential(nn.Embedding(6, 8), nn.Flatten(), nn.Linear(32, 3)))
    with pytest.warns(GoalNotMetWarning):
        outcome = unlearn(model, Subset(data, torch.nonzero(data.tensors[1] == 0).flatten().tolist()))
    assert outcome.choice.tried[-1].method == "MuMis()" and outcome.choice.tried[-1].result.startswith("not possible: ")


def test_few_remain_data_are_not_trusted_with_fresh_weights(model):
    few = Subset(CLASS[1], range(20))
    outcome = unlearn(model, CLASS[0], few, validation=UNSEEN)
    assert isinstance(outcome.method, FisherMask) and outcome.choice.goal_met is True and accuracy(outcome.model, CLASS[0]) <= 0.01
    assert unlearn(model, CLASS[0], few).choice.goal_met is None


def test_a_network_that_cannot_be_reset_is_masked():
    outcome = unlearn(trained(DATA, Bare()), *CLASS, validation=UNSEEN)
    assert isinstance(outcome.method, FisherMask) and outcome.choice.goal_met is True
    assert any("cannot be given fresh weights (give them a method `reset_parameters`)" in reason for reason in outcome.choice.reasons)
    assert any(tried.result.startswith("not possible: ") for tried in outcome.choice.tried)


def test_frozen_weights_stay_and_are_told(model):
    frozen = copy.deepcopy(model)
    frozen[0].requires_grad_(False)
    outcome = unlearn(frozen, *CLASS, validation=UNSEEN)
    assert "frozen weights, 832 of 5,252, stay as they are: what they know is not forgotten" in outcome.choice.reasons
    assert torch.equal(outcome.model[0].weight, model[0].weight)
    assert not any("frozen" in reason for reason in unlearn(model, *CLASS, validation=UNSEEN).choice.reasons)


@pytest.mark.parametrize("name", [pytest.param("transformer", marks=pytest.mark.slow), "BatchNorm", "adapters"])
def test_other_networks_come_out_sane(name):
    original = trained(DATA, built(name), 12)
    outcome = unlearn(original, *CLASS, validation=UNSEEN)
    kept = Subset(TEST, torch.nonzero(TEST.tensors[1]).flatten().tolist())
    assert outcome.choice.goal_met is True and accuracy(outcome.model, kept) >= accuracy(original, kept) - 0.03
    for (key, before), after in zip(original.named_parameters(), outcome.model.parameters(), strict=True):
        assert before.requires_grad or torch.equal(before, after), key


def test_an_outcome_saved_before_there_was_a_choice_still_loads(model, tmp_path):
    folder = unlearn(model, *CLASS, FisherMask(tuning=None)).save(tmp_path / "outcome")
    content = json.loads((folder / "result.json").read_text())
    assert content.pop("choice") is None
    (folder / "result.json").write_text(json.dumps(content))
    assert expunge.load_outcome(folder, model).choice is None


def test_a_rate_that_diverges_is_lowered_or_told(model):
    with (
        properties.assert_untouched(model),
        pytest.raises(DivergedError, match="^nothing that was tried stayed finite; give a lower rate"),
    ):
        unlearn(model, *CLASS, Choose(rate=1e6))


def test_what_is_tried_next():
    rungs = [
        Rung(str(number), "", strength, epochs, lambda tuning: None)
        for number, (strength, epochs) in enumerate([(1, 5), (1, 10), (2, 5), (3, 5)])
    ]
    names = {
        (True, True): [],
        (None, True): [],
        (True, False): ["2", "3"],  # did not forget: stronger
        (False, True): ["1"],  # lost the rest: longer, there is none gentler
        (False, False): ["2", "3"],
    }
    # Where it did neither, doing less is at least less harm.
    assert [rung.label for rung in left([rungs[0], rungs[3]], rungs[2], Verdict(False, False, ()))] == ["3", "0"]
    for (kept, forgotten), expected in names.items():
        assert [rung.label for rung in left(rungs[1:], rungs[0], Verdict(kept, forgotten, ()))] == expected
    assert [rung.label for rung in left(rungs[:2], rungs[2], Verdict(False, True, ()))] == ["0", "1"]


def test_it_is_the_same_as_naming_the_method(model):
    first, second = (
        unlearn(model, *CLASS, validation=UNSEEN, max_drop=0.03),
        unlearn(model, *CLASS, Choose(max_drop=0.03), validation=UNSEEN),
    )
    properties.assert_same_weights(first.model.state_dict(), second.model.state_dict())
    assert [replace(tried, seconds=0.0) for tried in first.choice.tried] == [replace(tried, seconds=0.0) for tried in second.choice.tried]
