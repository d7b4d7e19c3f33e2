"""What commands leave on disk: one run's results, whole, whatever else is there, whoever else writes, and however full the disk is."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from expunge.cli import commands as cli
from expunge.experiments import comparison, demo, profiles
from expunge.vision import zoo as training
from tests.disks import small_disk, small_files
from tests.experiments.test_comparison import row
from tests.experiments.tiny import TINY

CALL = [sys.executable, "-m", "expunge"]
SHORT = ["--epochs", "1", "--tuning-epochs", "1", "--quiet"]


def hurry(patch):
    """Demonstrations and comparisons that take no time."""
    numbers = demo.Accuracies(0.98, 0.0)

    def shown(model, data, label, *settings, **others):
        yield demo.Row(demo.TEXT, numbers, numbers, 1, 1.0, demo.network())
        yield demo.Row(f"FisherMask λ={label}", numbers, numbers, 1, 1.0, demo.network())
        yield demo.Row(demo.REFERENCE, None, numbers, 1, 1.0, demo.network())

    def compared(model, scenario, methods, *settings):
        return (replace(row(name), model=demo.network()) for name in ("before", *methods, "retrain"))

    patch.setattr(demo, "trained", lambda *arguments, **others: demo.network())
    patch.setattr(demo, "rows", shown)
    patch.setattr(comparison, "rows", compared)


@pytest.fixture
def at_once(monkeypatch):
    hurry(monkeypatch)


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_second_demo_takes_the_place_of_the_first(at_once, tmp_path, capsys):
    out = tmp_path / "runs" / "demo"
    for label in (3, 5):
        assert cli.main(["demo", "--label", str(label), "--out", str(out)]) == 0
        result = json.loads((out / "result.json").read_text())
        assert result["settings"]["label"] == label
        assert names(tmp_path / "runs") == {"demo", *(f"demo/{name}" for name in result["files"])}
        assert {*result["files"]} == {"result.json", "tradeoff.png", "before.safetensors", *(row["model"] for row in result["rows"])}


def test_a_second_comparison_takes_the_place_of_the_first(at_once, tmp_path, capsys):
    out = tmp_path / "compare"
    assert cli.main(["compare", "--methods", "ssd", "--models", "--out", str(out)]) == 0
    assert "ssd.safetensors" in names(out)
    assert cli.main(["compare", "--methods", "finetune", "--out", str(out)]) == 0
    assert names(out) == {"result.json", "tradeoff.png"}


@pytest.mark.parametrize("command, other", [("demo", "compare"), ("compare", "demo")])
def test_the_results_of_two_commands_are_not_mixed(at_once, command, other, tmp_path, capsys):
    assert cli.main([other, "--out", str(tmp_path / "out")]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert cli.main([command, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    rule = f"out: must be a folder that is new, empty, or holds an earlier result of `expunge {command}` and nothing else"
    assert told.out == "" and told.err.startswith(f"expunge: {rule}") and told.err.count("\n") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("full", [small_disk, small_files])
@pytest.mark.parametrize("command", ["demo", "compare"])
@pytest.mark.parametrize("below", ["out", "."])
def test_on_a_full_disk_the_table_is_printed_and_the_file_named(at_once, command, full, below, tmp_path, capsys):
    more = ["--models"] if command == "compare" else []
    with full(tmp_path) as folder:
        assert cli.main([command, *more, "--quiet", "--out", str(folder / below)]) == 1
        told = capsys.readouterr()
        assert "remain" in told.out and "98.0" in told.out and "result and picture" not in told.out.lower()
        assert told.err.startswith(f"expunge: {folder / below}/before.safetensors: ") and told.err.count("\n") == 1
        assert names(folder) == set()


def test_on_a_full_disk_an_earlier_result_stays(at_once, tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with small_files(tmp_path):
        assert cli.main(["demo", "--label", "3", "--out", str(tmp_path / "out")]) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


HURRIED = """
import sys, pytest
from expunge.cli import commands as cli
from tests.cli.test_saving import hurry
with pytest.MonkeyPatch.context() as patch:
    hurry(patch)
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["demo", "compare"])
def test_what_nobody_can_read_is_saved(command, tmp_path):
    with open("/dev/full", "w") as unwritable:
        asked = [sys.executable, "-c", HURRIED, command, "--quiet", "--out", str(tmp_path / "out")]
        finished = subprocess.run(asked, stdout=unwritable, stderr=subprocess.PIPE, text=True)
    assert (finished.returncode, finished.stderr) == (1, "expunge: No space left on device\n")
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize("command", [["demo"], ["compare", "--methods", "ssd"]])
def test_of_two_processes_one_is_refused_and_nothing_is_mixed(command, at_once, tmp_path, capsys):
    """The first holds the folder from its start; killed, it holds it no more."""
    out = tmp_path / "out"
    first = subprocess.Popen([*CALL, *command, "--epochs", "500", "--quiet", "--out", str(out)])
    while not names(tmp_path):
        assert first.poll() is None
        time.sleep(0.01)
    second = subprocess.run([*CALL, *command, *SHORT, "--out", str(out)], capture_output=True, text=True)
    rule = "out: must not be in use: another command is writing there"
    assert (second.returncode, second.stdout, second.stderr) == (2, "", f"expunge: {rule}; found {out}\n")
    first.kill()
    first.wait()
    assert cli.main([*command, *SHORT, "--out", str(out)]) == 0
    assert names(tmp_path) == {"out", *(f"out/{name}" for name in json.loads((out / "result.json").read_text())["files"])}


@pytest.mark.parametrize("full", [small_disk, small_files])
def test_a_training_on_a_full_disk_names_the_file(full, tmp_path, capsys):
    with full(tmp_path) as folder:
        asked = ["train", "--network", "resnet8", "--epochs", "1", "--batch-size", "256", "--quiet", "--out", str(folder / "train")]
        assert cli.main(asked) == 1
        told = capsys.readouterr()
        assert told.out.startswith("digits-resnet8-seed0: loss ") and told.err.count("\n") == 1
        assert told.err.startswith(f"expunge: {folder}/train/digits-resnet8-seed0.training.safetensors: ")


def test_a_training_whose_weights_cannot_be_saved_has_told_them(tmp_path, capsys, monkeypatch):
    """Its state is kept: the same command saves them when there is room."""

    def full(path, *rest):
        raise OSError(28, "No space left on device", str(path))

    asked = ["train", "--network", "resnet8", "--epochs", "1", "--batch-size", "256", "--quiet", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(training, "save_network", full)
        assert cli.main(asked) == 1
    failed = capsys.readouterr()
    assert failed.err == f"expunge: {tmp_path}/digits-resnet8-seed0.safetensors: No space left on device\n"
    assert cli.main(asked) == 0
    assert capsys.readouterr().out.splitlines()[0] == failed.out.splitlines()[0]


def test_two_trainings_are_the_same_files(tmp_path):
    asked = ["train", "--network", "resnet8", "--epochs", "1", "--batch-size", "256", "--quiet", "--out"]
    for number, folder in enumerate(("one", "two")):
        environment = os.environ | {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"}
        subprocess.run([*CALL, *asked, str(tmp_path / folder)], env=environment, check=True, capture_output=True)
    assert names(tmp_path / "one") == names(tmp_path / "two")
    for path in (tmp_path / "one").glob("*.*"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(profiles.PROFILES, "smoke", TINY)
        assert cli.main(["bench", "run", "table1", "--methods", "finetune", "--jobs", "1", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("full", [small_disk, small_files])
def test_a_page_on_a_full_disk_names_the_file(results, full, tmp_path, capsys):
    with full(tmp_path, size=8192) as folder:
        (folder / "page.html").write_text("old")
        assert cli.main(["report", str(results / "smoke"), "-o", str(folder / "page.html")]) == 1
        told = capsys.readouterr()
        assert told.err.startswith(f"expunge: {folder}/page.html: ") and told.err.count("\n") == 1
        assert (folder / "page.html").read_text() == "old" and names(folder) == {"page.html"}


@pytest.mark.parametrize("full", [small_disk, small_files])
def test_a_list_of_cells_on_a_full_disk_names_the_file(full, tmp_path, capsys):
    with full(tmp_path, size=8192) as folder:
        assert cli.main(["bench", "run", "all", "--dry-run", "--cells", str(folder / "cells.json"), "--out", str(tmp_path / "out")]) == 1
        told = capsys.readouterr()
        assert told.err.startswith(f"expunge: {folder}/cells.json: ") and told.err.count("\n") == 1
        assert names(folder) == set()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bench_on_a_full_disk_stores_nothing_false(jobs, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(profiles.PROFILES, "smoke", TINY)
    with small_disk(tmp_path) as folder:
        asked = ["bench", "run", "table1", "--methods", "finetune", "--jobs", str(jobs), "--out", str(folder)]
        assert cli.main(asked) == 1
        told = capfd.readouterr().err
        assert "No space left on device" in told and "Traceback" not in told
        assert not [path for path in folder.rglob("*.json") if path.parent.name == "cells"]
        assert not list(folder.rglob(".expunge*"))
