"""The summary: a row per model and task, the main methods, the paper's numbers, what is missing."""

from expunge.report.overview import overview
from tests.report import made


def summary(results, experiments=("table1",)):
    """Rows of the summary by their heading, cells by their column."""
    table = overview(results, experiments)
    titles = [column.title for column in table.columns]
    return {row[0].text: dict(zip(titles, row, strict=True)) for row in table.rows}


def test_the_main_methods_the_retrained_network_and_the_paper():
    methods = ("retrain", "finetune", "random-mask", "fisher-mask")
    results = [made.result(method, seed, relearn=None) for method in methods for seed in (0, 1)]
    (row,) = summary(results).values()
    assert list(row)[1:] == ["before", "retrained", "Finetune", "FisherMask", "best score of all", "missing"]
    assert row["before"].text == "85.0 / 87.6 / 45.3" and row["retrained"].text == "85.5 / 0.0 / 85.5"
    assert row["FisherMask"].text == "84.3 / 0.0 / 84.3" and row["FisherMask"].details == ["paper 86.1 / 0.0 / 86.1"]
    assert row["best score of all"].details[0] == "Finetune" and row["missing"].text == ""


def test_what_is_missing_is_named():
    nothing = dict.fromkeys(("best", "before", "retrained", "masked", "relearn"))
    failed = {"error": "no data: nothing there", "history": [], **nothing}
    results = [made.result("finetune", relearn=None), made.result("fisher-mask", **failed | {"error": "refused"})]
    results += [made.result("fisher-mask", cell_network="vgg16", **failed)]
    results += [made.result("finetune", cell_network="resnet32", relearn=None)]
    first, second, third = summary(results).values()
    assert first["missing"].text == "no result: FisherMask" and first["FisherMask"].details == ["paper 86.1 / 0.0 / 86.1"]
    assert second["missing"].text == "no data: all methods; not run: Finetune; no number in the paper" and second["before"].text == "–"
    assert third["missing"].text == "not run: FisherMask; no number in the paper" and third["FisherMask"].text == "–"


def test_of_several_settings_the_best_and_its_name():
    poison = {"cell_scenario": {"kind": "poisoned", "n": 200}, "experiments": ("table3",), "relearn": None}
    results = [
        made.result(cell_method={"name": "fisher-mask", "reading": "text", "ratio": ratio}, best=best, **poison)
        for ratio, best in ((0.15, made.accuracies(0.8, 0.5, on="test", epoch=1)), (0.2, made.accuracies(0.8, 0.0, on="test", epoch=2)))
    ]
    (row,) = summary(results, ("table3",)).values()
    assert row["FisherMask"].text == "80.0 / 0.0 / 80.0" and row["FisherMask"].details == ["ratio 0.2", "paper 82.3 / 2.2 / 80.7"]


def test_a_setting_has_one_row_and_the_time_to_relearn():
    results = [made.result("fisher-mask", experiments=("table1",), relearn=None, cell_recipe={})]
    results += [made.result("fisher-mask", experiments=("fig-relearn",), cell_recipe={}, cell_relearn={"rate": 0.1, "limit": 20})]
    (row,) = summary(results, ("table1", "fig-relearn")).values()
    assert row["FisherMask"].details == ["paper 86.1 / 0.0 / 86.1", "re-learned in 4.0"]


def test_the_best_of_all_is_also_of_methods_beyond_the_papers():
    results = [made.result("fisher-mask", experiments=("table1",), relearn=None)]
    results += [made.result("finetune", cell_network="vgg16", experiments=("table1",), relearn=None)]
    ours = {"experiments": ("forget",), "relearn": None, "best": made.accuracies(0.86, 0.0, on="test", epoch=5)}
    results += [made.result(cell_method={"name": "reset-and-distil", "reading": "text", "reset": 0.35}, **ours)]
    row, other = summary(results, ("table1", "forget")).values()
    assert row["best score of all"].text == "86.0 / 0.0 / 86.0" and row["best score of all"].details[0] == "ResetAndDistil"
    assert row["FisherMask"].text == "84.4 / 0.0 / 84.4" and row["missing"].text == "not run: Finetune"
    assert other["best score of all"].details[0] == "Finetune" and other["missing"].text == "not run: FisherMask; no number in the paper"
    more = {"cell_method": {"name": "fisher-mask", "reading": "text", "ratio": 0.2}, "best": made.accuracies(0.9, 0.0, on="test", epoch=5)}
    row = summary([*results, made.result(**ours | more)], ("table1", "forget"))["resnet20 on cifar10: class 0"]
    assert row["best score of all"].details == ("FisherMask", "ratio 0.2, made for forget")  # and no number of the paper, which has another
    assert row["FisherMask"].text == "84.4 / 0.0 / 84.4"
