"""The table forget: one for each section, with the columns its scenario is judged by, notes that name them, and no bold that misleads."""

import csv
import io
from dataclasses import replace

import pytest

from expunge.experiments.paper import AVERAGE
from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.profiles import PAPER, SMOKE
from expunge.report.formats import comma_separated, plain, show
from expunge.report.paper_tables import empty, tables
from tests.report.cases import made

FORGET = EXPERIMENTS["forget"]


def by_section(profile=SMOKE, **settings):
    return {table.section: table for table in tables(FORGET, *made("forget", profile, ("all",), **settings))}


def test_every_section_is_a_table_with_its_own_columns():
    shown = by_section()
    titles = {section: [" ".join(column.title.split()) for column in table.columns] for section, table in shown.items()}
    back, probes = ["back after 1", "back after 2", "back after 5"], ["probe stage 1", "probe stage 2"]
    labels = ["remain", "forget", "cost"]
    assert titles == {
        "a class": ["remain", "forget", "same forget", "cost", "loss attack", *back, "loss before", *probes],
        "5 % of the samples": ["remain", "forget", "loss attack", "cost"],
        "poison": ["remain", "forget", "score", "attack", "cost"],
        "10 % wrong labels": labels,
        "30 % wrong labels": labels,
        "50 % wrong labels": labels,
        "a class, no remain data": ["remain", "forget", "score"],
        "a class, 5 % remain data": ["remain", "forget", "score"],
    }
    for section, table in shown.items():
        assert section in table.title and {row.section for row in table.rows} == {""}
        assert {"w*", "Retrain"} < {row.label for row in table.rows}


def test_values_are_those_of_the_last_epoch_and_of_the_evidence():
    table = by_section()["a class"]
    reset = next(row for row in table.rows if row.label == "ResetAndDistil, last third")
    means = dict(zip((column.key for column in table.columns), (value.mean for value in reset.values), strict=True))
    assert means == pytest.approx(
        {
            "remain": 80,
            "forget": 50,
            "same": 70,
            "cost": 100 * 5 / 30,
            "loss_attack": 45,
            "relearned 1": 20,
            "relearned 2": 40,
            "relearned 5": 90,
            "relearn loss": 4.5,
            "probe stage1": 90,
            "probe stage2": 95,
        }
    )


def test_bold_is_only_what_is_good_by_itself():
    bold = {section: [column.key for column in table.columns if column.better] for section, table in by_section().items()}
    assert bold["a class"] == bold["5 % of the samples"] == []
    assert bold["poison"] == bold["a class, no remain data"] == ["unlearn_score"]
    assert bold["30 % wrong labels"] == ["remain"]
    assert not any(value.best for row in by_section()["a class"].rows for value in row.values)


def test_every_column_is_explained_once():
    for table in by_section().values():
        assert len(table.notes) == len({*table.notes})
        for column in table.columns:
            name = " ".join(column.title.split())
            assert column.note in table.notes and column.note.split(":")[0].removesuffix(" n") in name
        assert "The aim is Retrain's number" in plain([table])
    assert "given their wrong label" in plain([by_section()["10 % wrong labels"]])


def test_the_spread_of_the_cost_is_left_out_where_there_is_none():
    members, results = made("forget", SMOKE, ("all",))
    first = next(entry.cell for entry in members if entry.setting == "last third")
    drawn = plain(tables(FORGET, members, results)[:1])
    assert " 16.7 " in drawn and "16.7 ±" not in drawn
    results[first.digest] = replace(results[first.digest], last=replace(results[first.digest].last, epoch=4))
    assert "15.0 ±2.4" in plain(tables(FORGET, members, results)[:1])


def test_other_models_have_tables_but_no_average():
    shown = tables(FORGET, *made("forget", PAPER, ("all",)))
    assert len({table.block for table in shown}) == len(PAPER.models) and AVERAGE not in {table.block for table in shown}
    assert [table.section for table in shown if table.block == PAPER.models[1]] == ["a class"]


def test_what_has_not_run_is_said():
    members = entries(FORGET, SMOKE)
    drawn = tables(FORGET, members, {})
    assert empty(drawn) == sum(2 * len(table.rows) for table in drawn) and "not run" in plain(drawn)


def test_a_line_of_the_csv_names_section_and_setting():
    lines = list(csv.DictReader(io.StringIO(comma_separated(list(by_section().values())))))
    keys = [tuple(line[name] for name in ("block", "section", "method", "reading", "measure")) for line in lines]
    assert len({*keys}) == len(keys) > 100
    assert ("digits/resnet8", "a class", "reset-and-distil", "text, last third", "loss_attack") in keys


def test_it_fits_80_columns_and_a_class_is_three_lines_of_four(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(list(by_section().values()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    headings = [line.split() for line in lines if line.split()[:1] in (["remain"], ["attack"], ["before"])]
    assert headings[:3] == [["remain", "forget", "forget", "cost"], ["attack", "after", "1", "after", "2", "after", "5"], headings[2]]
    assert sum(line.split() == ["remain", "forget", "score", "attack", "cost"] for line in lines) == 1, "poison in one piece"
