"""Results that cannot be are refused by one line that names the file; so are lists of cells."""

from __future__ import annotations

import copy
import json
import math
import os
from typing import Any

import pytest

from expunge.cli import commands as cli
from expunge.errors import InputError
from expunge.experiments import results
from expunge.experiments.cells import Cell
from expunge.experiments.worker import main, read_work
from expunge.report.page import page, read_notes
from expunge.storage.codec import decode
from tests.report import made


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A result with something else in one place, its digest that of its cell."""
    content = copy.deepcopy(made.result("fisher-mask", cell_relearn={"rate": 0.1, "limit": 20}))
    part: Any = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    if path[0] == "cell":
        try:
            content["digest"] = decode(Cell, content["cell"]).digest
        except Exception:
            pass
    return content


def write(folder, content: dict[str, Any] | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    digest = "x" if isinstance(content, str) else content["digest"]
    path = results.path_of(folder, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_good_result_is_read(tmp_path):
    write(tmp_path, changed(("seconds",), 0))
    (found,) = results.load(tmp_path)
    assert found.experiments == ("table1", "table2") and found.history[2].epoch == 2


BEYOND = {"five": 5.0, "a hundred": 100, "below zero": -0.1, "text": "0.5", "a bool": True, "a list": [0.5]}
NUMBERS = {"not a number": math.nan, "infinite": math.inf, "many digits": 10**400, "many digits, below zero": -(10**400)}
SHARES = {
    "remain": ("best", "remain"),
    "forget": ("before", "forget"),
    "score": ("last", "unlearn_score"),
    "of an epoch": ("history", 3, "remain"),
    "masked": ("masked", "forget"),
    "of a class": ("class_accuracies", "after", 4),
    "predicted": ("predicted", "before", 0),
    "agreement": ("agreement",),
    "agreement by": ("agreement_by", "remain"),
    "attack": ("attack",),
    "attack before": ("before", "attack"),
    "masked share": ("masked_share", "conv.weight"),
    "ratio": ("cell", "method", "ratio"),
    "validation": ("cell", "validation"),
}


@pytest.mark.parametrize("value", {**BEYOND, **NUMBERS})
@pytest.mark.parametrize("place", SHARES)
def test_shares_are_from_0_to_1(tmp_path, place, value):
    write(tmp_path, changed(SHARES[place], {**BEYOND, **NUMBERS}[value]))
    with pytest.raises(InputError, match=r"results: .*\.json must hold the result of a cell \(") as caught:
        results.load(tmp_path)
    assert len(str(caught.value)) < 600


WRONG = {
    "seconds below zero": (("seconds",), -1),
    "seconds without end": (("seconds",), math.inf),
    "seconds whose square is infinite": (("seconds",), 1e308),
    "a divergence whose square is infinite": (("divergence",), -1e308),
    "a list of epochs to tune": (("cell", "tuning", "epochs"), [5]),
    "a reading that is a list": (("cell", "method", "reading"), ["text"]),
    "an epoch below zero": (("best", "epoch"), -1),
    "half an epoch": (("best", "epoch"), 1.5),
    "an epoch twice": (("history", 3, "epoch"), 2),
    "a loss that is no number": (("relearn", "losses", 0), math.nan),
    "re-learned after the limit": (("relearn", "epochs"), 21),
    "no limit": (("relearn", "limit"), 0),
    "a limit of many digits": (("relearn", "limit"), 10**400),
    "stability beyond two": (("stability", "remain"), 2.5),
    "divergence": (("divergence",), -math.inf),
    "half a character": (("error",), "\ud800"),
    "half a character in a name": (("versions", "\udfff"), "1"),
    "experiments of text": (("experiments",), "table1"),
    "a history of text": (("history",), "abc"),
    "a history that is an object": (("history",), {"a": 1}),
    "no cell": (("cell",), None),
    "a cell of a list": (("cell",), []),
    "a seed of many digits": (("cell", "seed"), 10**400),
    "a ratio of text": (("cell", "method", "ratio"), "0.02"),
    "a fraction of text": (("cell", "scenario", "fraction"), "half"),
    "a margin of text": (("cell", "relearn", "margin"), "x"),
    "no epochs": (("cell", "recipe"), {}),
    "a rate of text": (("cell", "tuning"), {"schedule": "constant", "rate": "fast"}),
    "a deep setting": (("cell", "recipe", "deep"), [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]),
    "an unknown measure": (("best", "more"), 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_results_that_cannot_be_are_refused(tmp_path, name):
    write(tmp_path, changed(*WRONG[name]))
    with pytest.raises(InputError, match=r"results: .*\.json must hold the result of a cell \("):
        results.load(tmp_path)


TEXTS = {
    "deep": "[" * 100_000,
    "a name twice": '{"cell": 1, "cell": 2}',
    "a list": "[]",
    "a number": "3",
    "nothing": "",
    "cut": '{"cell": {',
}


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_no_results_are_named(tmp_path, name, capsys):
    write(tmp_path / "smoke", TEXTS[name])
    with pytest.raises(InputError, match=r"x.json must hold the result of a cell"):
        results.load(tmp_path / "smoke")
    assert cli.main(["report", str(tmp_path / "smoke"), "--out", str(tmp_path / "page.html")]) == 2
    assert "Traceback" not in capsys.readouterr().err and not (tmp_path / "page.html").exists()


def test_a_pipe_among_the_results_is_named(tmp_path):
    (tmp_path / "cells").mkdir()
    os.mkfifo(tmp_path / "cells" / "x.json")
    with pytest.raises(InputError, match="x.json must hold the result of a cell .*plain file"):
        results.load(tmp_path)


SHOWN = {
    "one epoch": (("history",), made.result()["history"][:1]),
    "epochs far apart": (("history", 5, "epoch"), 2**62),
    "nothing masked": (("masked_share",), {"a": 0.0}),
    "next to nothing masked": (("masked_share",), {"a": 5e-324}),
    "no classes": (("class_accuracies",), {}),
    "classes without numbers": (("class_accuracies", "after"), [None] * 10),
    "seconds near the largest": (("seconds",), 1e100),
    "losses near the largest": (("relearn", "losses"), [1e100, -1e100]),
    "losses that were infinite": (("relearn", "losses"), [None, 1.0]),
    "divergence near the largest": (("divergence",), -1e100),
    "no re-learning": (("relearn",), None),
    "a scenario of many parts": (("cell", "scenario", "more"), {"a": [1, {"b": [None, 2.5]}]}),
    "a network nobody knows": (("cell", "network"), "<script>"),
    "a method nobody knows": (("cell", "method", "name"), ""),
    "a null character": (("cell", "dataset"), "\0"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_odd_results_that_can_be_are_shown(tmp_path, name):
    write(tmp_path, changed(*SHOWN[name]))
    write(tmp_path, made.result("fisher-mask", 1, cell_relearn={"rate": 0.1, "limit": 20}))  # of one seed alone there is no spread
    assert "<html" in page(results.load(tmp_path), "here")


def work(*tasks: Any, **settings: Any) -> str:
    return json.dumps({"tasks": list(tasks), "folder": "out", "models": "models", **settings})


CELLS = {
    "deep": "[" * 100_000,
    "an object": "{}",
    "a list": "[]",
    "a number": "3",
    "of numbers": work(1),
    "of nothing": work({}),
    "not a number": "[NaN]",
    "a cell of text": work({"cell": "x"}),
    "no jobs": work(jobs=0),
    "an unknown setting": work(more=1),
}
CELLS |= {
    name: work({"cell": changed(*place)["cell"]})
    for name, place in WRONG.items()
    if place[0][0] == "cell" and isinstance(changed(*place)["cell"], dict)
}


@pytest.mark.parametrize("name", CELLS)
def test_lists_that_are_none_of_cells_are_refused(tmp_path, name):
    (tmp_path / "cells.json").write_text(CELLS[name])
    with pytest.raises(InputError, match="cells: .*cells.json must be cells as `expunge bench run --cells` writes them"):
        main([str(tmp_path / "cells.json")])


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "1", "2", "3"], ["a", "-x"]])
def test_a_worker_takes_one_file(arguments):
    with pytest.raises(InputError, match="cells: must be one file"):
        main(arguments)


def test_a_list_of_cells_is_read(tmp_path):
    cell = changed(("seconds",), 0)["cell"]
    (tmp_path / "cells.json").write_text(work({"cell": cell, "experiments": ["table1"]}, {"cell": cell}))
    assert [task.experiments for task in read_work(tmp_path / "cells.json").tasks] == [("table1",), ()]


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": NaN}', '{"a": ["\\ud800"]}', '{"a": [], "a": []}', '{"a": "text"}', "[]"])
def test_notes_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "notes.json").write_text(content)
    with pytest.raises(InputError, match="notes.json: .*notes.json must"):
        read_notes(tmp_path)
