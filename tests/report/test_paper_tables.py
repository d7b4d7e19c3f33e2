"""Tables from made-up results: means, spreads, bold, the paper's numbers, gaps, and the four formats."""

import csv
import io
from dataclasses import replace

import pytest

from expunge.experiments.paper import AVERAGE, Number
from expunge.experiments.plans import EXPERIMENTS
from expunge.experiments.profiles import SMOKE
from expunge.experiments.results import Relearn
from expunge.report.formats import FORMATS, comma_separated, latex, markdown, plain, show
from expunge.report.paper_tables import empty, is_comparable, tables
from tests.report.cases import made, result


def row_of(table, label):
    return next(row for row in table.rows if row.label == label)


def test_means_spreads_gaps_and_bold():
    masked, best, last, *_ = tables(EXPERIMENTS["table1"], *made("table1"))
    assert [table.view for table in (masked, best, last)] == ["masked", "best", "last"]
    fisher, finetune = row_of(best, "FisherMask"), row_of(best, "Finetune")
    remain, forget, score, epochs = fisher.values
    assert remain.mean == pytest.approx(82) and remain.sd == pytest.approx(1) and remain.seeds == 3
    assert remain.paper == Number(86.1, 0.4) and remain.gap == pytest.approx(-4.1) and remain.best
    assert forget.best and not finetune.values[1].best and not finetune.values[0].best
    assert score.mean == pytest.approx(82) and epochs.mean == 5
    assert not row_of(best, "Retrain").values[0].best
    assert "chosen on the test set, as the paper does" in best.title
    assert not row_of(last, "FisherMask").values[0].paper


def test_without_fine_tuning_finetune_is_the_original():
    masked = tables(EXPERIMENTS["table1"], *made("table1"))[0]
    assert [row.label for row in masked.rows] == ["w*", "FisherMask", "FisherMask, released"]
    assert row_of(masked, "w*").values[1].paper == Number(87.6, 0.4)
    assert not any(value.best for value in row_of(masked, "w*").values)


def test_an_average_stands_beside_the_papers_with_the_number_of_models():
    members, found = made("table1")
    average = [table for table in tables(EXPERIMENTS["table1"], members, found) if table.block == AVERAGE]
    assert [table.compared for table in average] == [True, True, False]
    remain = row_of(average[1], "FisherMask").values[0]
    assert remain.paper == Number(76.3, 0.2) and remain.gap is None and not remain.spread
    assert remain.mean == pytest.approx(82) and remain.beside == "76.3 ±0.2"
    assert any(note.startswith("The mean over 2 models, cifar10/resnet20, cifar100/googlenet") for note in average[1].notes)
    assert any("average over its 16 models: no gap" in note for note in average[1].notes)
    assert "In brackets: the paper's number." in plain(average) and "over seeds" not in plain(average)


def test_a_part_of_a_dataset_is_said():
    members, found = made("table1")
    whole = {digest: replace(each, class_accuracies={"after": [0.5] * 100, "before": [0.5] * 100}) for digest, each in found.items()}
    part = {digest: replace(each, class_accuracies={"after": [0.5] * 10}) for digest, each in found.items()}
    said = "cifar100: 10 of its 100 classes, the part that was at hand."
    for results, blocks in ((found, set()), (whole, set()), (part, {"cifar100/googlenet", AVERAGE})):
        assert {table.block for table in tables(EXPERIMENTS["table1"], members, results) if said in table.notes} == blocks


def test_an_average_weighs_models_alike_and_needs_all_of_them():
    members, found = made("table1")
    first = [entry for entry in members if entry.block == "cifar10/resnet20"]
    fewer = {digest: each for digest, each in found.items() if digest not in {entry.cell.digest for entry in first[1:]}}
    average = [table for table in tables(EXPERIMENTS["table1"], members, fewer) if table.block == AVERAGE]
    lone, other = (row_of(average[1], label).values[0] for label in ("Retrain", "FisherMask"))
    of_models = [
        next(row for row in table.rows if row.label == "Retrain").values[0].mean
        for table in tables(EXPERIMENTS["table1"], members, fewer)
        if table.view == "best" and table.block != AVERAGE
    ]
    assert lone.mean == pytest.approx(sum(of_models) / 2) and of_models[0] != of_models[1]
    assert other.mean is None and other.text == "1 of 2"


def test_sixteen_models_have_a_gap_to_the_papers_average():
    assert is_comparable("table1", AVERAGE, 16) and not is_comparable("table1", AVERAGE, 15)
    assert is_comparable("table1", "cifar10/resnet20", 1) and not is_comparable("table2", "cifar10/resnet20", 1)


def test_table_two_has_the_papers_average_beside_any_model():
    table = tables(EXPERIMENTS["table2"], *made("table2"))[0]
    assert row_of(table, "FisherMask").values[0].paper == Number(2.6, 0.6)
    assert any("average over its 16 models" in note for note in table.notes)
    assert not tables(EXPERIMENTS["table2"], *made("table2", SMOKE))[0].compared


def test_sections_have_their_own_best_and_their_own_numbers():
    table = tables(EXPERIMENTS["table3"], *made("table3", methods=("random-mask", "fisher-mask")))[0]
    fisher = [row for row in table.rows if row.label == "FisherMask"]
    assert [row.section for row in fisher] == ["ratio 0.15", "ratio 0.20", "ratio 0.25"]
    assert [row.values[2].paper.value for row in fisher] == [77.9, 80.7, 79.5]
    assert all(row.values[0].best for row in fisher)
    assert row_of(table, "w*").values[0].mean == pytest.approx(85)


def test_what_is_missing_is_said():
    members, found = made("table1")
    cut = {digest: each for digest, each in found.items() if each.cell.method["name"] != "fisher-mask"}
    assert empty(tables(EXPERIMENTS["table1"], members, found)) == 0 < empty(tables(EXPERIMENTS["table1"], members, cut))
    failed = {digest: replace(result(each.cell, error="no data: nothing there")) for digest, each in found.items()}
    table = tables(EXPERIMENTS["table1"], members, failed)[1]
    assert row_of(table, "FisherMask").values[0].text == "no data"
    assert "fisher-mask: no data: nothing there" in table.notes
    members, found = made("fig-influence")
    failed = {digest: result(each.cell, error="no data: nothing there") for digest, each in found.items()}
    assert row_of(tables(EXPERIMENTS["fig-influence"], members, failed)[0], "FisherMask").values[0].text == "no data"


def test_seeds_beyond_the_limit_are_counted():
    members, found = made("fig-relearn", relearn=Relearn(4, 40, 0.1, (1.0, 0.1)))
    label = row_of(tables(EXPERIMENTS["fig-relearn"], members, found)[0], "FisherMask").values[0]
    assert label.mean == 4
    first = next(entry for entry in members if entry.cell.method["name"] == "fisher-mask" and entry.cell.method["reading"] == "text")
    found[first.cell.digest] = replace(found[first.cell.digest], relearn=Relearn(None, 40, 0.1, (1.0,)))
    table = tables(EXPERIMENTS["fig-relearn"], members, found)[0]
    assert row_of(table, "FisherMask").values[0].ours == "beyond in 1 of 3" and table.columns[0].title == "epochs, of at most 40"


def test_curves_keep_their_last_value():
    members, found = made("fig-influence", methods=("finetune", "influence"))
    for digest, each in found.items():
        if each.cell.method["name"] == "influence":
            found[digest] = replace(each, history=each.history[:1])
    table = tables(EXPERIMENTS["fig-influence"], members, found)[0]
    assert [column.title for column in table.columns] == list("012345")
    assert len({value.mean for value in row_of(table, "Influence").values}) == 1


def test_markdown():
    text = markdown(tables(EXPERIMENTS["table1"], *made("table1"))[:2])
    assert "| | remain | forget | unlearn score | epochs |" in text
    assert "| FisherMask | **82.0 ±1.0** (86.1 ±0.4; -4.1) | **0.0 ±0.0** (0.0 ±0.0; +0.0) |" in text


def test_latex():
    text = latex(tables(EXPERIMENTS["table4"], *made("table4"))[:1])
    assert r"FisherMask & \textbf{82.0} {\scriptsize$\pm$1.0} (83.25; $-1.2$) &" in text
    assert r"\multicolumn{5}{l}{\emph{10 \%}} \\" in text and text.count(r"\begin{tabular}{lcccc}") == 1


def test_csv_is_one_line_a_number():
    found = tables(EXPERIMENTS["table1"], *made("table1"))[1:2]
    lines = list(csv.DictReader(io.StringIO(comma_separated(found))))
    assert len(lines) == len(found[0].rows) * len(found[0].columns)
    line = next(each for each in lines if (each["method"], each["reading"], each["measure"]) == ("fisher-mask", "text", "remain"))
    assert (line["mean"], line["sd"], line["seeds"], line["paper"], line["gap"], line["best"]) == (
        "82.0000",
        "1.0000",
        "3",
        "86.1",
        "-4.1000",
        "1",
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_experiment_in_every_format(name, form):
    text = FORMATS[form](tables(EXPERIMENTS[name], *made(name, SMOKE, ("all",), relearn=Relearn(3, 40, 0.1, (1.0, 0.1)))))
    assert "not run" not in text and ("FisherMask" in text or "fisher-mask" in text)


def test_the_terminal_has_colours_where_there_is_rich(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    found = tables(EXPERIMENTS["table1"], *made("table1"))[1:2]
    show(found)
    assert "\x1b[" in (written := capsys.readouterr().out) and "FisherMask" in written and "-4.1" in written
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    show(found)
    assert capsys.readouterr().out == plain(found)


def test_a_row_that_a_view_does_not_have_stays_out_also_where_a_seed_is_missing():
    members, results = made("table1")
    seed = members[0].cell.seed
    some = {digest: each for digest, each in results.items() if each.cell.seed == seed}
    masked, best, *_ = tables(EXPERIMENTS["table1"], members, some)
    assert [row.label for row in masked.rows] == ["w*", "FisherMask", "FisherMask, released"]
    assert "Not all seeds have run yet; numbers are of those that have." in best.notes and "one seed" in plain([best])
    assert not any("Not all seeds" in note for table in tables(EXPERIMENTS["table1"], members, results) for note in table.notes)
