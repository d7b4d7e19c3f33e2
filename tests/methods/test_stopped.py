"""Every method, stopped after any epoch of its training and called again within `training.kept`, ends as if it never had been."""

import dataclasses
import itertools

import pytest

from expunge import training
from expunge.errors import InputError
from expunge.methods import Choose, LoTUS
from expunge.training import checkpoints, keeping
from expunge.unlearning import unlearn
from tests.methods import cases, properties

pytestmark = [
    pytest.mark.filterwarnings("ignore::expunge.errors.LostAccuracyWarning"),
    pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning"),
    pytest.mark.filterwarnings("ignore:the input sensitivity:expunge.errors.UncheckedWarning"),
]
LONG = ("potion", "influence", "influence-released", "newton-noise")  # take seconds before they train, as others do
OTHERS = (*LONG, "choose")
HOT = {"lotus-that-cools": lambda tuning: LoTUS(gain=8.0, unseen_accuracy=0.0, tuning=tuning)}  # its accuracy falls as it trains
CASES = HOT | {name: case for name, case in (cases.CASES | cases.READINGS | cases.UNLISTED).items() if name not in OTHERS}


class Stop(Exception):
    """As a kill: nobody within catches it."""


def forgotten(method, **others):
    return unlearn(cases.model(), cases.forget(), cases.remain(), method, **others)


def told(outcome):
    """All that is recorded but seconds."""
    choice = outcome.choice and dataclasses.replace(
        outcome.choice, tried=tuple(dataclasses.replace(tried, seconds=0.0) for tried in outcome.choice.tried)
    )
    return [dataclasses.replace(record, seconds=0.0) for record in outcome.history], choice


def stop_after_states(monkeypatch, numbers):
    """Every state is written at once, and after some of them the program ends."""
    monkeypatch.setattr(keeping, "EVERY", 0.0)
    monkeypatch.setattr(keeping, "SHARE", 0.0)
    monkeypatch.setattr(keeping, "WORTH", 0.0)
    save, count = checkpoints.save, itertools.count(1)

    def stopping(*arguments):
        save(*arguments)
        if (number := next(count)) in numbers:
            raise Stop(number)

    monkeypatch.setattr(checkpoints, "save", stopping)
    return count


def until_it_ends(call, folder):
    """The outcome, and how often it was stopped before."""
    for stops in range(100):
        try:
            with training.kept(folder):
                return call(), stops
        except Stop:
            continue
    raise AssertionError("it never ends")


@pytest.mark.parametrize("name", CASES)
def test_a_method_stopped_twice_ends_the_same(name, tmp_path, monkeypatch):
    method = CASES[name](cases.LONGER)
    whole = forgotten(method)
    stop_after_states(monkeypatch, {1, 3})
    outcome, stops = until_it_ends(lambda: forgotten(method), tmp_path / "kept")
    trained = whole.history[-1].epoch
    assert stops == min(2, (trained + 1) // 2) > 0
    properties.assert_same_weights(whole.model.state_dict(), outcome.model.state_dict())
    assert told(outcome) == told(whole)
    assert (outcome.edit is None) == (whole.edit is None)


def test_a_choice_stopped_after_every_state_is_the_same(tmp_path, monkeypatch):
    method = Choose(epochs=12)
    whole = forgotten(method)
    stop_after_states(monkeypatch, range(100))
    outcome, stops = until_it_ends(lambda: forgotten(method), tmp_path / "kept")
    assert stops >= 8  # the rates that are tried, and the epochs of the trials
    properties.assert_same_weights(whole.model.state_dict(), outcome.model.state_dict())
    assert told(outcome) == told(whole)


def test_what_is_kept_of_a_choice_is_not_made_again(tmp_path, monkeypatch):
    count = stop_after_states(monkeypatch, ())
    for _ in range(2):
        with training.kept(tmp_path):
            forgotten(Choose(epochs=12))
    assert next(count) - 1 == sum(1 for _ in tmp_path.iterdir()) + sum(_epochs(path) - 1 for path in tmp_path.iterdir())


def _epochs(path):
    return int(checkpoints.load_tensors(path, checkpoints.KIND)[1]["epoch"])


def test_seconds_of_trainings_that_are_read_back_count(tmp_path, monkeypatch):
    """A budget by the clock is not given anew to a program that goes on."""
    stop_after_states(monkeypatch, ())
    with training.kept(tmp_path):
        first = forgotten(Choose(epochs=12))
    with training.kept(tmp_path):
        again = forgotten(Choose(epochs=12))
    assert [tried.seconds for tried in again.choice.tried] == pytest.approx([tried.seconds for tried in first.choice.tried], abs=0.5)
    with training.kept(tmp_path):
        before = keeping.clock()
        keeping._contexts[-1].spared += 1000
        assert keeping.clock() - before >= 1000
        budgeted = keeping.clock()
    assert keeping.clock() < budgeted


def test_a_budget_by_the_clock_that_was_spent_before_the_stop_is_spent(tmp_path, monkeypatch):
    stop_after_states(monkeypatch, ())
    spare = keeping.Keeper._spare
    with training.kept(tmp_path):
        forgotten(Choose(seconds=60.0))
    monkeypatch.setattr(keeping.Keeper, "_spare", lambda self, seconds: spare(self, 1000.0))  # as if every training had taken so long
    with training.kept(tmp_path), pytest.raises(InputError, match="seconds"):
        forgotten(Choose(seconds=60.0))
