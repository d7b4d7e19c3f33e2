"""What commands leave on disk: one run's results, whole, whatever else is there, whoever else writes, and however full the disk is."""

import json
import os
import subprocess
import sys

import pytest

from expunge.cli import commands as cli
from expunge.experiments import construction, profiles
from expunge.report import comparison
from expunge.storage.tensors import weights_digest
from expunge.vision import zoo as training
from tests.disks import small_disk, small_files
from tests.experiments.tiny import TINY, few_digits

CALL = [sys.executable, "-m", "expunge"]
SHORT = ["--epochs", "1", "--tuning-epochs", "1", "--quiet"]


@pytest.fixture
def at_once(monkeypatch):
    few_digits(monkeypatch)
    yield
    construction.parts.cache_clear()


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def files(folder):
    return {path.name for path in folder.iterdir() if path.is_file()}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_demo_takes_the_place_of_the_first(at_once, tmp_path, capsys):
    for label in (3, 5):
        assert cli.main(["demo", *SHORT, "--label", str(label), "--out", str(tmp_path)]) == 0
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["settings"]["label"] == label and files(tmp_path) == {*result["files"]}
        assert {each["cell"]["scenario"]["label"] for each in result["results"]} == {label}
        weights = {each["weights"]["after"] for each in result["results"]}
        assert {weights_digest(training.load_network(path)) for path in tmp_path.glob("*.safetensors")} == weights


@pytest.mark.parametrize("written", [1, 3])
def test_a_demo_that_was_cut_short_while_it_saved_goes_on(at_once, written, tmp_path, capsys, monkeypatch):
    """Its networks are there, and no result that lists them: no file of the user's, but its own."""
    out, plain, calls = tmp_path / "out", comparison.write_bytes, []

    def write(path, content):
        if len(calls) == written:
            raise KeyboardInterrupt
        calls.append(path)
        plain(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "write_bytes", write)
        assert cli.main(["demo", *SHORT, "--out", str(out)]) == 130
    assert len(list(out.glob("*.safetensors"))) == written
    assert cli.main(["demo", *SHORT, "--out", str(out)]) == 0
    assert files(out) == {*json.loads((out / "result.json").read_text())["files"]}


def test_files_of_the_user_are_neither_replaced_nor_removed(at_once, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["demo", *SHORT, "--out", str(tmp_path)]) == 0 and (tmp_path / "notes.txt").read_text() == "mine"
    capsys.readouterr()
    for name in ("result.json", "page.html", "retrain.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        assert cli.main(["demo", *SHORT, "--out", str(folder)]) == 2
        rule = "out: must be a folder where `expunge demo` replaces no file but its own: choose another, or move what is there"
        told = capsys.readouterr()
        assert told.out == "" and told.err == f"expunge: {rule}; found {folder / name}\n"
        assert names(folder) == {name} and (folder / name).read_text() == "{}"


@pytest.mark.parametrize("command, other", [("demo", "compare"), ("compare", "demo")])
def test_the_results_of_two_commands_are_not_mixed(at_once, command, other, tmp_path, capsys):
    few = ["--methods", "ssd"]
    assert cli.main([other, *SHORT, *(few if other == "compare" else []), "--out", str(tmp_path)]) == 0
    before = contents(tmp_path)
    capsys.readouterr()
    assert cli.main([command, *SHORT, *(few if command == "compare" else []), "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("expunge: out: must be a folder where") and told.err.count("\n") == 1
    assert contents(tmp_path) == before


def test_results_of_the_bench_are_left_alone(at_once, tmp_path, capsys):
    assert cli.main(["compare", *SHORT, "--methods", "ssd", "--out", str(tmp_path)]) == 0
    for name in ("result.json", "page.html"):
        (tmp_path / name).unlink()
    for path in (tmp_path / "cells").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"experiments": ["table1"]}))
    before = contents(tmp_path)
    capsys.readouterr()
    assert cli.main(["compare", *SHORT, "--methods", "ssd", "--out", str(tmp_path)]) == 2
    assert "out: must be a folder without results of other commands" in capsys.readouterr().err and contents(tmp_path) == before


def test_a_changed_result_does_not_make_us_remove_a_users_file(at_once, tmp_path, capsys):
    command = ["compare", *SHORT, "--methods", "ssd", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "result.json").write_text(json.dumps(result | {"files": [*result["files"], "notes.txt"]}))
    assert cli.main(command) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("full", [small_disk, small_files])
@pytest.mark.parametrize("command", [["demo"], ["compare", "--methods", "ssd"]])
@pytest.mark.parametrize("below", ["out", "."])
def test_a_full_disk_is_one_line_that_names_the_file(at_once, command, full, below, tmp_path, capsys):
    with full(tmp_path, size=8192) as folder:
        asked = [*command, *SHORT, *(["--jobs", "1"] if command[0] == "compare" else []), "--out", str(folder / below)]
        assert cli.main(asked) == 1
        told = capsys.readouterr()
        assert told.err.startswith(f"expunge: {folder / below}/models/") and told.err.count("\n") == 1
        assert not list(folder.rglob("result.json")) and not list(folder.rglob("cells/*.json")) and not list(folder.rglob(".expunge*"))


def test_on_a_full_disk_an_earlier_result_stays(at_once, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["demo", *SHORT, "--out", str(out)]) == 0
    before = contents(tmp_path)
    with small_files(tmp_path, size=8192):
        assert cli.main(["demo", *SHORT, "--label", "3", "--out", str(out)]) == 1
    assert {path: content for path, content in contents(tmp_path).items() if path in before} == before


HURRIED = """
import sys, pytest
from expunge.cli import commands as cli
from tests.experiments.tiny import few_digits
with pytest.MonkeyPatch.context() as patch:
    few_digits(patch)
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["demo"], ["compare", "--methods", "ssd", "--jobs", "1"]])
def test_what_nobody_can_read_is_saved(command, tmp_path):
    with open("/dev/full", "w") as unwritable:
        asked = [sys.executable, "-c", HURRIED, *command, *SHORT, "--out", str(tmp_path / "out")]
        finished = subprocess.run(asked, stdout=unwritable, stderr=subprocess.PIPE, text=True)
    assert (finished.returncode, finished.stderr) == (1, "expunge: No space left on device\n")
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize("command", [["demo"], ["compare", "--methods", "ssd", "--jobs", "1"]])
def test_of_two_processes_both_end_and_nothing_is_done_twice(command, tmp_path):
    """Each cell and each training is locked while it is done; whoever comes second has its result."""
    asked = [sys.executable, "-c", HURRIED, *command, "--epochs", "1", "--tuning-epochs", "1", "--out", str(tmp_path / "out")]
    both = [subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [each.communicate() for each in both]
    assert [each.returncode for each in both] == [0, 0] and told[0][0] == told[1][0]
    labels = [line.rpartition(":")[0] for _, lines in told for line in lines.splitlines() if not line.startswith("trained")]
    assert labels and len(labels) == len({*labels})
    assert files(tmp_path / "out") == {*json.loads((tmp_path / "out" / "result.json").read_text())["files"]}


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
