"""A choice within epochs and seconds: no more than allowed, and nothing started that will not fit."""

import math
import time

import pytest
import torch
from torch.utils.data import Subset

from expunge import GoalNotMetWarning, InputError, ModelError, ResetAndDistil, fisher, unlearn
from expunge.methods.choosing import budget as budgets
from expunge.methods.choosing.budget import Budget
from tests.methods import cases, properties
from tests.methods.choosing.small import CLASS, DATA, UNSEEN, Bare, Numbered, clouds, trained, watched_training


@pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning")
@pytest.mark.parametrize("epochs", [1, 3, 12])
def test_no_more_epochs_than_allowed(model, epochs):
    data, counts = Numbered(DATA), []
    forget, remain = Subset(data, range(60)), Subset(data, range(60, 640))
    unlearn(model, forget, remain, objective=watched_training(counts), watch={}, epochs=epochs, max_drop=0)
    assert 0 < len(torch.cat(counts)) <= epochs * 580


def test_one_epoch_over_many_samples_is_not_spent_on_a_search():
    many = clouds(32_000, seed=5)
    forget, remain = Subset(many, range(0, 32_000, 4)), Subset(many, [row for row in range(32_000) if row % 4])
    outcome = unlearn(trained(clouds(640, seed=2)), forget, remain, epochs=1)
    assert outcome.history[-1].epoch == 1 and any("too few epochs to search for a rate" in reason for reason in outcome.choice.reasons)


def test_what_is_not_possible_costs_no_epochs():
    """The network is of bare parameters, none of which can be reset."""
    outcome = unlearn(trained(DATA, Bare()), *CLASS, epochs=28, validation=UNSEEN)
    resets = [tried for tried in outcome.choice.tried if tried.method.startswith("ResetAndDistil(") and "(())" not in tried.method]
    mask = next(tried for tried in outcome.choice.tried if tried.method.startswith("FisherMask"))
    assert resets and all(tried.result.startswith("not possible: ") and tried.epochs == 0 for tried in resets)
    assert mask.epochs >= 5


def test_where_all_that_would_be_reset_is_frozen_no_epoch_is_spent_on_it():
    frozen = trained(DATA)
    frozen[2].requires_grad_(False), frozen[4].requires_grad_(False)
    with pytest.raises(
        ModelError, match="^model: all that is to be reset is frozen, such as 4.weight; unfreeze it, or reset other weights"
    ):
        unlearn(frozen, *CLASS, ResetAndDistil(tuning=cases.QUICK))
    with pytest.warns(GoalNotMetWarning):
        outcome = unlearn(frozen, *CLASS, epochs=3)
    assert outcome.choice.tried[0].epochs == 0 and outcome.choice.tried[-1].method.startswith("ResetAndDistil(1), 3 epochs")


def test_a_budget_of_seconds_is_kept_and_too_little_is_refused(model):
    started = time.perf_counter()
    outcome = unlearn(model, *CLASS, seconds=1.5, validation=UNSEEN)
    assert time.perf_counter() - started < 3 and outcome.history[-1].epoch >= 1
    with (
        properties.assert_untouched(model),
        pytest.raises(InputError, match="^seconds: must be about .* at least, for one pass .*found 1e-06"),
    ):
        unlearn(model, *CLASS, seconds=1e-6)


def test_a_pass_is_timed_as_it_will_be_made(model, monkeypatch):
    """The mask's takes as many backward passes as there are classes."""
    kinds, diagonal = [], fisher.diagonal
    monkeypatch.setattr(fisher, "diagonal", lambda *data, kind, **settings: kinds.append(kind) or diagonal(*data, kind=kind, **settings))
    unlearn(model, CLASS[0], Subset(CLASS[1], range(20)), validation=UNSEEN, seconds=60)
    assert len(kinds) > 2 and {*kinds} == {"batch"}


def test_what_is_left_of_a_budget(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(budgets, "clock", lambda: now[0])
    budget = Budget(10, 60)
    budget.timed(0.5, 20)
    assert budget.epoch_seconds == pytest.approx(12)
    assert budget.epochs_left(0, 0) == pytest.approx(5)
    now[0] += 24
    assert budget.epochs_left(0, 12) == pytest.approx(2)
    budget.spend(9.5)
    assert budget.epochs_left(0, 0) == pytest.approx(0.5) and budget.epochs_left(1, 0) < 0
    assert Budget(None, None).epochs_left(2, 5) == math.inf
