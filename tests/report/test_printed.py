"""The paper's numbers beside ours, and where the two are not comparable."""

import pytest

from expunge.report.printed import printed
from expunge.report.rows import settings
from tests.report import made


def number(experiment, view="best", measure="remain", **changes):
    """The paper's number for FisherMask, or the method in the changes, and why there is no gap."""
    (setting,) = settings([made.result(experiments=(experiment,), **changes)])
    return printed(experiment, setting.rows[0], view, measure)


def test_the_same_settings_are_comparable():
    for view in ("masked", "best"):
        assert number("table1", view).reason == ""
    assert number("table1", cell_method={"name": "fisher-mask", "reading": "released"}).reason == ""


@pytest.mark.parametrize(
    ("experiment", "changes", "why"),
    [
        ("table1", {"method": "retrain"}, "last epoch"),
        ("table1", {"measure": "epochs"}, "count from 0"),
        ("table1", {"cell_method": {"name": "fisher-noise", "reading": "golatkar"}}, "neither the paper's text nor its program"),
        ("table1", {"cell_recipe": {"epochs": 30}}, "epochs 30, the paper's with 160"),
        ("table1", {"cell_recipe": {"weight_decay": 5e-4}}, "weight decay 0.0005"),
        ("table1", {"cell_validation": 0.2}, "20 % of our training data"),
        ("table1", {"cell_scenario": {"kind": "category", "label": 3}}, "label is 3"),
        ("table1", {"cell_tuning": {"schedule": "replayed", "epochs": 10}}, "10 epochs"),
        ("table1", {"best": {"on": "validation", "epoch": 5, **made.accuracies(0.8, 0.1)}}, "chosen on validation data"),
        ("table2", {"view": "stability"}, "average over 16 models"),
        (
            "table3",
            {"cell_method": {"name": "fisher-mask", "ratio": 0.2}, "cell_scenario": {"kind": "poisoned", "n": 60}},
            "n is 60, the paper's 200",
        ),
        ("table4", {"cell_scenario": {"kind": "mislabelled", "fraction": 0.1}}, "wrong labels by heart"),
        (
            "table5",
            {"cell_method": {"name": "tf-idf-mask"}, "cell_scenario": {"kind": "category", "label": 0, "remain_fraction": 0.001}},
            "all training data",
        ),
    ],
)
def test_what_is_not_comparable_says_why(experiment, changes, why):
    theirs = number(experiment, **changes)
    assert theirs is not None and why in theirs.reason


def test_the_networks_to_compare_with_have_their_own_numbers():
    (setting,) = settings([made.result("random-mask"), made.result("fisher-mask")])
    before, retrained = setting.references
    assert printed("table1", before, "before", "forget").number.value == 87.6 and printed("table1", before, "before", "forget").reason == ""
    assert printed("table1", retrained, "best", "remain").number.value == 85.5
    limited = {"kind": "category", "label": 0, "remain_count": 0}
    (setting,) = settings([made.result("random-mask", cell_scenario=limited)])
    before, retrained = setting.references
    assert printed("table5", before, "before", "remain").number.value == 85.0 and printed("table5", retrained, "best", "remain") is None
