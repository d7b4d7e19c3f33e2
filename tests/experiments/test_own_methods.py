"""Methods of one's own by import path, from end to end: several processes, readings, revisions, and results that outlive the class."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from expunge.cli import commands as cli
from expunge.errors import InputError
from expunge.experiments import comparison, construction, profiles
from expunge.experiments.cells import Cell
from expunge.experiments.construction import method_of
from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.recalled import planned_or_stored
from expunge.experiments.results import load
from expunge.experiments.runner import run
from expunge.report.formats import FORMATS
from expunge.report.paper_tables import tables
from expunge.storage.codec import decode, encode
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from tests.experiments.tiny import TINY, few_digits, place, tasks

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"
HALVING = re.search(r"here `halving.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
OTHER = """
from __future__ import annotations
from dataclasses import dataclass
from expunge.storage.codec import decode, encode
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning

@dataclass(frozen=True)
class Halving:
    ratio: float = 0.5
    seed: int = 0
    rounding: int = 2
    tuning: Tuning | None = Tuning()
    revision = 2

    @classmethod
    def as_released(cls, tuning: Tuning = Tuning(Constant(0.5, 3))) -> Halving:
        return cls(tuning=tuning)

    def __call__(self, model, forget, remain, run):
        run.after_epoch(0)
"""
FILE, MODULE, SECOND = "halving.py:Halving", "own_pack.module:Halving", "own_pack/other.py:Halving"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with two methods of one name, and the smallest size."""
    monkeypatch.setitem(profiles.PROFILES, "smoke", TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    (tmp_path / "halving.py").write_text(HALVING)
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "module.py").write_text(HALVING)
    (tmp_path / "own_pack" / "other.py").write_text(OTHER)
    yield tmp_path
    _forget()


def _forget():
    for name in [name for name in sys.modules if name.startswith(("own_pack", "expunge_method_"))]:
        del sys.modules[name]


def method_names(folder):
    return {result.cell.method["name"]: result.error for result in load(folder)}


@pytest.mark.slow
def test_it_is_run_by_several_processes_and_outlives_its_class(here, capfd):
    """Of a file and of a package in the working directory, by the page's own ten lines; then both are removed."""
    listed = ["--methods", f"./{FILE}", MODULE, "--out", "out"]
    assert cli.main(["bench", "run", "table1", *listed, "--jobs", "2"]) == 0, capfd.readouterr()
    assert method_names("out/smoke") == {"retrain": None, FILE: None, MODULE: None}
    capfd.readouterr()
    assert cli.main(["bench", "table", "table1", *listed, "--format", "text"]) == 0
    before = capfd.readouterr()
    assert FILE in before.out and MODULE in before.out and "not run" not in before.out and before.err == ""
    assert cli.main(["bench", "list", "table1", *listed]) == 0 and "3 of 3 cells done" in capfd.readouterr().out

    (here / "halving.py").unlink()
    (here / "own_pack" / "module.py").unlink()
    _forget()
    assert cli.main(["bench", "table", "table1", *listed, "--format", "text"]) == 0
    after = capfd.readouterr()
    assert after.out == before.out and after.err.count("shown is what has been run before") == 2
    assert cli.main(["bench", "table", "table1", "--methods", FILE, "--out", "out", "--format", "text"]) == 0
    assert re.search(r"^Halving ", capfd.readouterr().out, re.MULTILINE)  # the class's name is enough
    assert cli.main(["bench", "list", "table1", *listed]) == 0 and "3 of 3 cells done" in capfd.readouterr().out
    assert cli.main(["bench", "report", *listed]) == 0
    assert f"Halving, name {FILE}" in Path("out/smoke.html").read_text()
    assert cli.main(["bench", "run", "table1", *listed, "--jobs", "2"]) == 2
    assert "there is no file" in capfd.readouterr().err
    assert cli.main(["bench", "table", "table1", "--methods", "own_pack.never:Run", "--out", "out"]) == 2


def test_every_table_has_its_rows_and_stored_cells_find_their_places(here):
    """Without running anything: results are made of the cells."""
    (here / "cells").mkdir()
    planned = {experiment: entries(experiment, TINY, listed=[SECOND]) for experiment in EXPERIMENTS.values()}
    own = {experiment.name: [entry for entry in found if entry.row == SECOND] for experiment, found in planned.items()}
    assert {name for name, found in own.items() if found} == {"table1", "table2", "table3", "table4", "table5", "fig-relearn"}
    stored: dict[str, dict] = {}
    for name, found in own.items():
        for entry in found:
            told = {"cell": encode(entry.cell), "digest": entry.cell.digest, "history": [], "seconds": 0.0, "error": "made"}
            known = stored.setdefault(entry.cell.digest, {**told, "versions": {}, "hardware": {}, "experiments": []})
            known["experiments"].append(name)
    for told in [*stored.values()]:  # and results of an earlier revision, which are not mixed with them
        method = {**told["cell"]["method"], "revision": 1}
        earlier = decode(Cell, {**told["cell"], "method": method})
        stored[earlier.digest] = {**told, "cell": encode(earlier), "digest": earlier.digest}
    for digest, told in stored.items():
        (here / "cells" / f"{digest}.json").write_text(json.dumps(told))
    (here / "own_pack" / "other.py").unlink()
    _forget()
    lines: list[str] = []
    recalled = planned_or_stored(EXPERIMENTS.values(), TINY, (), [SECOND, f"./{SECOND}"], here, lines.append)
    assert len(lines) == 1
    for experiment, found in planned.items():
        assert sorted(map(repr, recalled[experiment])) == sorted(map(repr, found)), experiment.name
        both = [FORMATS["text"](tables(experiment, each, {})) for each in (recalled[experiment], found)]
        assert both[0] == both[1]


def test_a_cell_has_the_readings_the_revision_and_the_settings_of_the_others():
    cells = [entry.cell for entry in entries(EXPERIMENTS["table1"], TINY, listed=[SECOND]) if entry.row == SECOND]
    text, released = cells
    assert text.method == {"name": SECOND, "reading": "text", "revision": 2, "ratio": 0.02}
    assert released.method == {"name": SECOND, "reading": "released", "revision": 2}
    assert text.tuning == {"schedule": "replayed", "epochs": 2} and released.tuning == {"schedule": "own", "epochs": 3}
    built = method_of(text)
    assert (built.ratio, built.seed, built.rounding, built.tuning.schedule.epochs) == (0.02, 1, 2, 2)
    assert method_of(released).tuning == Tuning(Constant(0.5, 3), seed=1)


def test_the_digest_does_not_depend_on_the_working_directory(here, monkeypatch):
    first = [entry.cell.digest for entry in entries(EXPERIMENTS["table1"], TINY, listed=[FILE])]
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "halving.py").write_text(HALVING)
    monkeypatch.chdir(here / "elsewhere")
    assert [entry.cell.digest for entry in entries(EXPERIMENTS["table1"], TINY, listed=[f"./{FILE}"])] == first


def test_names_and_paths_are_mixed():
    found = {entry.row for entry in entries(EXPERIMENTS["table1"], TINY, listed=["fisher-mask", FILE, SECOND])}
    assert found == {"retrain", "fisher-mask", FILE, SECOND}
    every = {entry.row for entry in entries(EXPERIMENTS["table1"], TINY, listed=["all", FILE])}
    assert FILE in every and "scrub" in every and FILE not in {entry.row for entry in entries(EXPERIMENTS["table1"], TINY)}
    labels = {row.label for row in tables(EXPERIMENTS["table1"], entries(EXPERIMENTS["table1"], TINY, listed=[FILE, SECOND]), {})[0].rows}
    assert labels == {"Retrain", FILE, SECOND, f"{SECOND}, released"}


def test_a_path_that_a_process_cannot_import_leaves_no_result(here, tmp_path):
    """As of a list of cells from another machine."""
    asked = [task for task in tasks("table1", (FILE,)) if task.cell.method["name"] == FILE]
    gone = [replace(task, cell=replace(task.cell, method={**task.cell.method, "name": "own_pack.gone:Halving"})) for task in asked]
    lines: list[str] = []
    assert run(gone, place(tmp_path), say=lines.append) == 1
    assert lines[-1].startswith("BROKEN ") and "there is no module own_pack.gone" in lines[-1]
    assert not load(tmp_path / "tiny")


@pytest.mark.parametrize("do", ["run", "table", "list"])
@pytest.mark.parametrize(
    "name", ["nowhere.py:Own", "own_pack.nowhere:Own", "halving.py:Missing", "halving.py:dataclass", f"{FILE}-released"]
)
def test_a_mistake_is_refused_before_the_work(do, name, capsys):
    (Path("out") / "smoke" / "cells").mkdir(parents=True)
    assert cli.main(["bench", do, "fig-ratio", "--methods", "fisher-mask", name, "--out", "out"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("expunge: methods: ") and told.err.count("\n") == 1 and not list(Path("out").rglob("*.json"))


def test_the_script_expunge_finds_modules_of_the_working_directory(here):
    """Its first folder to import from is its own, not the working directory."""
    code = "import sys; sys.path = [folder for folder in sys.path if folder]; from expunge.cli.commands import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "bench", "run", "table1", "--methods", MODULE, "--dry-run", "--out", "out"]
    finished = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert finished.returncode == 0 and MODULE in finished.stdout, finished.stderr


def test_a_comparison_has_rows_of_ones_own(here, monkeypatch, capsys):
    few_digits(monkeypatch)
    listed = [FILE, SECOND, f"{SECOND}-released", "mask-classifier"]
    asked = ["compare", "--epochs", "1", "--tuning-epochs", "1", "--quiet", "--models", "--out", "out", "--seed", "3", "--jobs", "1"]
    assert cli.main([*asked, "--methods", *listed]) == 0
    rows = json.loads(Path("out/result.json").read_text())["results"]
    methods = {(row["cell"]["method"]["name"], row["cell"]["method"]["reading"]): row["setting"] for row in rows}
    assert [name for name, _ in methods] == ["original", FILE, SECOND, SECOND, "mask-classifier", "retrain"]
    assert methods[FILE, "text"] == "Halving()"
    assert methods[SECOND, "text"].startswith("Halving(ratio=0.02, seed=3, rounding=2, tuning=Tuning(schedule=Replay(")
    assert {path.name for path in Path("out").glob("*.safetensors")} >= {
        "halving.py-Halving.safetensors",
        "own_pack-other.py-Halving.safetensors",
        "own_pack-other.py-Halving-released.safetensors",
    }
    capsys.readouterr()
    for name in (f"{FILE}-released", "nowhere:Own"):
        assert cli.main([*asked, "--methods", name]) == 2 and capsys.readouterr().err.startswith("expunge: methods: ")
    construction.parts.cache_clear()


def test_a_method_without_remain_data_is_not_fine_tuned():
    scenario = comparison.scenario_settings("category", remain=False)
    plan = comparison.comparison("compare", scenario, comparison.names([SECOND]), 1, 1, seed=2)
    built = method_of(plan.entries[1].cell)
    assert built.tuning is None and built.seed == 2
    with pytest.raises(InputError, match="the readings of .* are text, released"):
        comparison.names([f"{SECOND}-golatkar"])
