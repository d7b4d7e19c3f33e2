"""The best epoch and the stability of a history, against their formulas."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expunge import FisherMask, InputError, unlearn
from expunge.metrics import best_epoch, fluctuation, stability, unlearn_score
from expunge.vision.scenarios import category
from tests.methods import cases


def history(remain, forget, validation_remain=None, validation_forget=None):
    names = ("remain", "forget", "validation remain", "validation forget")
    columns = [column for column in (remain, forget, validation_remain, validation_forget) if column is not None]
    return [
        SimpleNamespace(epoch=epoch, accuracies=dict(zip(names, row, strict=False))) for epoch, row in enumerate(zip(*columns, strict=True))
    ]


def test_the_epoch_is_chosen_on_the_validation_part():
    records = history([0.9, 0.8, 0.7], [0.0, 0.0, 0.0], [0.5, 0.9, 0.9], [0.0, 0.1, 0.0])
    best = best_epoch(records)
    assert (best.epoch, best.chosen_on, best.score) == (2, "validation", 0.9)
    assert best.accuracies["remain"] == 0.7
    flattered = best_epoch(records, on="test")
    assert (flattered.epoch, flattered.chosen_on, flattered.score) == (0, "test", 0.9)


def test_the_first_of_equals():
    assert best_epoch(history([0.5, 0.9, 0.9], [0, 0, 0]), on="test").epoch == 1


fractions = st.floats(0, 1)


@given(st.lists(st.tuples(fractions, fractions), min_size=1, max_size=8))
def test_no_epoch_is_better(rows):
    best = best_epoch(history(*zip(*rows, strict=True)), on="test")
    scores = [unlearn_score(*row) for row in rows]
    assert best.score == max(scores) == scores[best.epoch] and best.score not in scores[: best.epoch]


def test_a_choice_needs_what_it_chooses_on():
    with pytest.raises(
        InputError, match=r"history: needs the accuracies 'validation remain' and 'validation forget'.*found \['forget', 'remain'\]"
    ):
        best_epoch(history([0.5], [0.1]))
    with pytest.raises(InputError, match="history: needs .*found none"):
        best_epoch([SimpleNamespace(epoch=0, accuracies={})], on="test")
    with pytest.raises(InputError, match="history: must not be empty"):
        best_epoch([])
    with pytest.raises(InputError, match="on: must be 'validation' or 'test'; found train"):
        best_epoch(history([0.5], [0.1]), on="train")


def test_stability_is_the_papers_formula():
    remain, forget = [0.7, 0.8, 0.85, 0.84, 0.86, 0.86], [0.3, 0.1, 0.2, 0.0, 0.0, 0.1]
    found = stability(history(remain, forget))
    scores = [r / (1 + f) for r, f in zip(remain, forget, strict=True)]
    for value, series in ((found.remain, remain), (found.forget, forget), (found.unlearn_score, scores)):
        assert value == pytest.approx(sum(abs(series[t] - series[t - 1]) for t in range(1, 6)) / 4, rel=1e-12)  # S = 5: 5 steps over 4


@given(st.lists(fractions, min_size=3, max_size=8), st.floats(-1, 1))
def test_laws_of_the_fluctuation(values, shift):
    found = fluctuation(values)
    assert found >= abs(values[-1] - values[0]) / (len(values) - 2) - 1e-12
    assert fluctuation(values[::-1]) == pytest.approx(found)
    assert fluctuation([value + shift for value in values]) == pytest.approx(found, abs=1e-12)
    assert fluctuation([0.5] * len(values)) == 0


@pytest.mark.parametrize("epochs", [1, 2])
def test_one_epoch_has_no_stability(epochs):
    with pytest.raises(InputError, match=f"history: must hold epoch 0 and at least two epochs of training; found {epochs} records"):
        stability(history([0.5] * epochs, [0.1] * epochs))


def test_stability_starts_after_masking():
    with pytest.raises(InputError, match=r"history: must hold every epoch from 0 on; found \[1, 2, 3\]"):
        stability(history([0.5] * 4, [0.1] * 4)[1:])


def test_a_history_of_unlearn_is_one():
    data = cases.dataset()
    scenario = category(data, 0, data, data)
    outcome = unlearn(cases.model(), *scenario, FisherMask(0.1, tuning=cases.LONGER), watch=scenario.watch)
    assert best_epoch(outcome.history).score == max(record.unlearn_score for record in outcome.epochs)
    assert stability(outcome.history).remain >= 0


def test_the_model_before_is_no_epoch():
    records = [SimpleNamespace(epoch=None, accuracies={"remain": 1.0, "forget": 0.0}), *history([0.5, 0.7, 0.6], [0.1, 0.1, 0.1])]
    assert best_epoch(records, on="test") == best_epoch(records[1:], on="test")
    assert stability(records) == stability(records[1:])
    with pytest.raises(InputError, match="history: must not be empty"):
        best_epoch(records[:1], on="test")


def test_epochs_without_remain_accuracy_are_named():
    """As `unlearn` makes them where `watch` does not name what to measure."""
    records = history([0.5, 0.7, 0.6], [0.1, 0.1, 0.1])
    records[1] = SimpleNamespace(epoch=1, accuracies={"forget": 0.1})
    for measure in (lambda: best_epoch(records, on="test"), lambda: stability(records)):
        with pytest.raises(InputError, match=r"history: needs .* of every epoch: name both in `watch` of `unlearn`; found \['forget'\]"):
            measure()
