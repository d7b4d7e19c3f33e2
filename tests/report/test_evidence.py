"""What the page shows of evidence: beside the retrained network, against the cost, by epoch, with labels that people understand."""

import importlib.util
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from expunge.experiments.results import Result
from expunge.report import evidence, page
from expunge.report.rows import rows, settings
from expunge.report.svg import Plane
from expunge.storage.codec import decode
from tests.report import made

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "forgetting.py"


def setting(kind="category", results=None):
    members = made.forgetting() if results is None else results
    (chosen,) = settings([result for result in members if result["cell"]["scenario"]["kind"] == kind])
    return chosen


def texts(lines):
    return {line[0].text: [cell.text for cell in line[1:]] for line in lines}


def test_labels_name_nested_settings_in_words():
    assert [row.label for row in setting().rows] == [
        "Retrain",
        "FisherMask",
        "FisherMask, distilled",
        "MaskClassifier",
        "ResetAndDistil, 60 % by Fisher",
        "ResetAndDistil, reset 0.35",
        "original",
    ]


def test_labels_tell_distillations_and_epochs_apart():
    warm = {**made.DISTILLED, "distillation": {"temperature": 8.0, "weight": 0.9}}
    tunings = ({"schedule": "replayed", "epochs": 5}, made.DISTILLED, warm)
    assert [row.label for row in rows([made.result("finetune", cell_tuning=tuning) for tuning in tunings])] == [
        "Finetune",
        "Finetune, distilled, temperature 4",
        "Finetune, distilled, temperature 8",
    ]
    resets = ((0.35, 5), (0.65, 8), ({"ratio": "some", "kind": "expected"}, 5))
    method = {"name": "reset-and-distil", "reading": "text"}
    results = [
        made.result("retrain", cell_method={**method, "reset": reset}, cell_tuning={**made.ONE_CYCLE, "epochs": epochs})
        for reset, epochs in resets
    ]
    assert {row.label for row in rows(results)} == {
        "ResetAndDistil, reset 0.35, epochs 5",
        "ResetAndDistil, reset 0.65, epochs 8",
        "ResetAndDistil, kind expected, some by Fisher, epochs 5",
    }


def test_the_retrained_network_is_one_row_and_has_its_evidence():
    retrained = next(row for row in setting().rows if row.retrained)
    assert len(retrained.results) == 2 and all(result["evidence"] for result in retrained.results)
    bare = next(row for row in setting("poisoned").rows if row.retrained)
    assert len(bare.results) == 2
    assert [row.label for row in setting().references] == ["before", "Retrain"]
    assert not {"original", "Retrain"} & {row.label for row in setting().methods}


def test_what_is_still_known_stands_below_the_networks_before_and_retrained():
    table = evidence.known(setting())
    assert [column.title for column in table.columns] == ["method", "loss attack", "1", "2", "5", "loss before", "stage1", "stage2"]
    assert list(texts(table.references)) == ["before", "Retrain"]
    assert texts(table.references)["Retrain"] == [
        "50.0 ± 0.0",
        "12.5 ± 3.5",
        "56.2 ± 1.8",
        "94.5 ± 0.2",
        "4.38 ± 0.18",
        "70.0 ± 0.0",
        "53.1 ± 0.9",
    ]
    assert texts(table.rows)["ResetAndDistil, reset 0.35"][1] == "22.5 ± 3.5" and "before" not in texts(table.rows)
    assert "The retrained network's numbers are the aim" in table.note


def test_samples_have_the_loss_attack_alone_and_poison_has_nothing():
    table = evidence.known(setting("subset"))
    assert [column.title for column in table.columns] == ["method", "loss attack"] and "Probe" not in table.note
    assert (
        evidence.against_cost(setting("subset"), "x") is None
        and evidence.relearning_curves(setting("subset"), "x", evidence.LOSSES) is None
    )
    assert evidence.known(setting("poisoned")) is None


def test_accuracies_and_cost_after_the_last_epoch():
    table = evidence.afterwards(setting("poisoned"))
    assert [column.title for column in table.columns][1:] == [
        "remain",
        "forget",
        "score",
        "attack success",
        "epochs",
        "cost, % of a retraining",
        "seconds",
    ]
    assert texts(table.rows)["ResetAndDistil, reset 0.35"] == [
        "86.0 ± 0.0",
        "2.0 ± 0.0",
        "84.3 ± 0.0",
        "3.0 ± 0.0",
        "5",
        "3.1",
        "3.2 ± 0.0",
    ]
    assert texts(table.references)["Retrain"][4:6] == ["160", "100.0"] and texts(table.references)["before"][4:] == ["–", "–", "–"]
    alone = [result for result in made.forgetting() if result["cell"]["method"]["name"] == "fisher-mask"]
    assert texts(evidence.afterwards(setting("poisoned", alone)).references)["Retrain"][3:] == ["10.0 ± 0.0", "–", "–", "–"], (
        "not the method's"
    )


def drawing(figure, place=0):
    return ElementTree.fromstring(figure.pictures[place].drawing)


def test_a_mark_for_every_method_and_seed_against_the_cost():
    figure = evidence.against_cost(setting(), "cost")
    tips = [mark.text for mark in drawing(figure).iter("title")][1:]
    assert len(tips) == 12 == len(figure.table.rows) and "ResetAndDistil, reset 0.35, seed 1: 3.12 % of a retraining, 25.0 % back" in tips
    assert not any("original" in tip for tip in tips)
    assert [text for _, text in figure.legend] == [
        "Retrain",
        "FisherMask: a plain; b distilled",
        "MaskClassifier",
        "ResetAndDistil: a 60 % by Fisher; b reset 0.35",
    ]
    ticks = [text.text for text in drawing(figure).iter("text") if text.get("class") is None]
    assert ticks[:6] == ["0", "5", "10", "20", "50", "100"]
    plane = Plane((0, 1), (-3.0, 106.0), ("x", "y"))
    (level,) = (line for line in drawing(figure).iter("line") if line.get("class") == "level")
    assert float(level.get("y1")) == pytest.approx(plane.at(0, 12.5)[1], abs=0.01)


def test_the_cost_lies_on_a_logarithmic_axis_and_nothing_is_left_of_it():
    places = evidence._places([0.0, 1.0, 10.0, 100.0])
    assert places == pytest.approx({0.0: -0.5, 1.0: 0, 10.0: 1, 100.0: 2})
    assert list(evidence._ticks(places).values()) == ["0", "1", "2", "5", "10", "20", "50", "100"]
    assert list(evidence._ticks(evidence._places([0.001, 100.0])).values()) == ["0.001", "0.01", "0.1", "1", "10", "100"]
    assert list(evidence._ticks(evidence._places([0.0])).values()) == ["0"]


def test_without_the_retrained_network_there_is_no_level_and_it_is_said():
    alone = [result for result in made.forgetting() if result["cell"]["method"]["name"] != "retrain"]
    figure = evidence.against_cost(setting(results=alone), "cost")
    assert "which is not among these results" in figure.text
    assert not [line for line in drawing(figure).iter("line") if line.get("class") == "level"]
    only = [result for result in made.forgetting() if result["cell"]["method"]["name"] == "retrain"]
    assert evidence.against_cost(setting(results=only), "cost") is None


@pytest.mark.parametrize("measure", evidence.CURVES)
def test_the_retrained_networks_curve_is_in_every_picture(measure):
    figure = evidence.relearning_curves(setting(), "curve", measure)
    assert [picture.heading for picture in figure.pictures] == [row.label for row in setting().methods]
    for place in range(len(figure.pictures)):
        lines = list(drawing(figure, place).iter("polyline"))
        assert [line.get("class").split()[2:] for line in lines] == [["dashed"], ["thin"], ["thin"], []]
        heights = [float(point.split(",")[1]) for line in lines for point in line.get("points").split()]
        assert 0 <= min(heights) and max(heights) <= evidence.SMALL[1]
    first = texts(figure.table.rows)["Retrain"]
    assert first[:2] == (["0.0", "12.5"] if measure == evidence.UNSEEN else ["4.375", "2.188"])


def test_infinite_losses_are_gaps_in_a_curve_and_no_part_of_a_mean():
    members = made.forgetting()
    found = [result.get("evidence") or {} for result in members if result["cell"]["method"]["name"] == "retrain"]
    losses = [part["relearn_losses"] for part in found if "relearn_losses" in part]
    expected = f"{losses[1][0]:.3f}"
    losses[0][0] = None  # of one seed of two
    for curve in losses:
        curve[1] = None
    figure = evidence.relearning_curves(setting(results=members), "curve", evidence.LOSSES)
    assert texts(figure.table.rows)["Retrain"][:2] == [expected, "–"]


def test_the_page_has_all_of_it_where_it_was_measured():
    text = page([decode(Result, result) for result in made.forgetting()])
    part = unescape(text[text.index('<section id="forget"') : text.rindex("How it was run")])
    blocks = re.split("<h3", part)[1:]
    assert len(blocks) == 3
    for words in ("What is still known, %", "Evidence against cost.", "Re-learning: accuracy", "Re-learning: loss"):
        assert [words in block for block in blocks] == ["class 0" in block or ("subset" in block and "known" in words) for block in blocks]
    assert all("After the last epoch, %" in block for block in blocks) and "No data here for" not in part
    assert "original" not in re.sub("<[^>]+>", " ", part)


def test_the_picture_of_the_docs_is_drawn_from_a_folder(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("forgetting_picture", PICTURE)
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    folder = made.write(tmp_path, made.forgetting())
    first, second = (picture.main([str(folder), "--out", str(tmp_path / name)]).read_text() for name in ("a.svg", "b.svg"))
    assert first == second and "ResetAndDistil, reset 0.35: 22 %" in first and "original" not in first
    (empty := tmp_path / "empty" / "cells").mkdir(parents=True)
    with pytest.raises(SystemExit):
        picture.main([str(empty.parent)])
    assert "has no results with a re-learn curve" in capsys.readouterr().err
