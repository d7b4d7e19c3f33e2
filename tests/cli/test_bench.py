"""`expunge bench` from end to end, on a profile of seconds."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from expunge.cli import commands as cli
from expunge.experiments import profiles
from tests.experiments.tiny import TINY


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(profiles.PROFILES, "smoke", TINY)
        assert cli.main(["bench", "run", "table1", "--methods", "finetune", "--jobs", "1", "--out", str(folder)]) == 0
    return str(folder)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(profiles.PROFILES, "smoke", TINY)


def told(capsys, *arguments):
    assert cli.main(["bench", *arguments]) == 0
    return capsys.readouterr().out


def test_list_tells_how_much_is_done(out, capsys):
    written = told(capsys, "list", "table1", "table3", "--methods", "finetune", "--out", out)
    assert "Remove a full category: 2 of 2 cells done" in written and "Remove poisoned samples: 0 of 2 cells done" in written
    assert "digits/resnet8, seeds 1" in written


def test_table(out, capsys):
    written = told(capsys, "table", "table1", "--methods", "finetune", "--out", out, "--format", "markdown")
    assert "### table1: Remove a full category, digits/resnet8, at the epoch chosen on validation data" in written
    assert "| Retrain | " in written and "| Finetune | " in written and "not run" not in written


def test_a_dry_run_tells_how_long_and_does_nothing(out, capsys, tmp_path):
    cells = tmp_path / "cells.json"
    asked = ["run", "table3", "--methods", "finetune", "--out", out, "--jobs", "1", "--dry-run", "--cells", str(cells)]
    written = told(capsys, *asked)
    assert "would train digits resnet8 poisoned 60 2 white train seed=1: " in written
    assert "would run digits resnet8 poisoned n=60 trigger=2 value=white finetune seed=1: " in written
    assert "\n1 network would be trained, and 2 of 2 cells would run, in 1 process; 0 are done already\nthat takes about " in written
    assert "unknown" not in written and written.endswith(f"\nnothing was run; without --dry-run the results are in {out}/smoke/\n")
    assert len(json.loads(cells.read_text())["tasks"]) == 2
    assert told(capsys, *asked) == written
    done = told(capsys, "run", "table1", "--methods", "finetune", "--out", out, "--jobs", "1", "--dry-run")
    assert done.startswith("0 of 2 cells would run, in 1 process; 2 are done already\nnothing was run; ")
    unknown = told(capsys, "run", "table3", "--methods", "finetune", "--dry-run", "--out", f"{tmp_path / 'new'}//")
    assert ": time unknown\n" in unknown and "\na time is unknown where nothing alike has run yet on such a device\n" in unknown
    assert "about" not in unknown and unknown.endswith(f" in {tmp_path}/new/smoke/\n") and not (tmp_path / "new").exists()


TAMPERED = [
    {"hardware": None},
    {"seconds": "a"},
    {"seconds": None},
    {"cell": []},
    {"cell": {}},
    {"best": {"epoch": 1}},
    {"best": 3},
    {"history": [{"epoch": "1", "remain": 1, "forget": 1, "unlearn_score": 1, "seconds": 1}]},
    {"class_accuracies": {"after": [1, "b"]}},
    {"predicted": [1]},
    {"experiments": [3]},
    {"error": 3},
    {"digest": "0" * 20},
    "[]",
    "{",
]


@pytest.mark.parametrize("change", TAMPERED, ids=str)
def test_a_result_that_was_tampered_with_is_named(out, change, capsys, tmp_path):
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    path = sorted(tmp_path.glob("smoke/cells/*.json"))[0]
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    same = ["table1", "--methods", "finetune", "--out", str(tmp_path), "--device", "cpu"]
    for command in (
        ["report", str(tmp_path / "smoke"), "-o", str(tmp_path / "page.html")],
        *(["bench", do, *same] for do in ("list", "run", "table")),
    ):
        assert cli.main([*command, "--dry-run"] if "run" in command else command) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"expunge: results: {path} must hold the result of ") and told.count("\n") == 1


def test_a_result_under_the_name_of_another_is_named(out, capsys, tmp_path):
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    first, second = sorted(tmp_path.glob("smoke/cells/*.json"))
    first.write_bytes(second.read_bytes())
    assert cli.main(["bench", "list", "table1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"expunge: results: {first} must hold the result of the cell it is named by; found that of {second.stem}\n"
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"seconds": 1}', '{"seconds": "a", "device": "cpu", "spec": {}}'])
def test_a_note_of_a_network_that_was_tampered_with_is_named(out, content, capsys, tmp_path):
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    note = sorted(tmp_path.glob("models/*.spec.json"))[0]
    note.write_text(content)
    assert cli.main(["bench", "run", "table3", "--dry-run", "--device", "cpu", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"expunge: models: {note} must record how a network was trained") and told.count("\n") == 1


def test_adopting_needs_a_name(out, capsys, tmp_path):
    assert cli.main(["bench", "adopt", str(tmp_path / "mine.safetensors"), "--out", out]) == 2
    assert "file: must be called DATASET-NETWORK-seedN.safetensors" in capsys.readouterr().err


def test_a_network_that_is_not_there_is_not_adopted(capsys, tmp_path):
    file = tmp_path / "digits-resnet8-seed1.safetensors"
    assert cli.main(["bench", "adopt", str(file), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"expunge: file: must be that of a network; found no file {file}\n"
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_import_torch():
    program = "import sys; from expunge.cli.commands import main; main(['bench', '--help'])"
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    finished = subprocess.run([sys.executable, "-c", check + program], capture_output=True, text=True)
    assert finished.returncode == 0 and "--dry-run" in finished.stdout and finished.stdout.endswith("False\n")


@pytest.mark.parametrize("device", ["foo", "cuda"])
def test_a_device_that_is_not_here_is_refused(capsys, tmp_path, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "list", "table1", "--device", device, "--out", str(tmp_path)]) == 2
    usable = "cpu or cuda" if torch.cuda.is_available() else "cpu; it finds no CUDA device"
    assert capsys.readouterr().err == f"expunge: device: must be one that torch finds here, such as {usable}; found {device}\n"


@pytest.mark.slow
def test_ctrl_c_stops_the_processes_without_a_traceback(tmp_path):
    """The signal goes to the whole group, as from a terminal."""
    command = [sys.executable, "-m", "expunge", "bench", "run", "table1", "--jobs", "2", "--out", str(tmp_path)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job, as these tests may be, begins deaf to it
    runner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)
    while not list(tmp_path.rglob("*.training.safetensors")):
        assert runner.poll() is None
        time.sleep(0.01)
    os.killpg(runner.pid, signal.SIGINT)
    with runner.stderr:
        written = runner.stderr.read()
    assert runner.wait() == 130 and written.endswith("expunge: stopped\n")
    assert "Traceback" not in written and "expunge.experiments.runner" not in written  # it is told once, not by every process


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "zzz"], "only: must be words of the line of a cell that is asked for; found zzz\n"),
        (["--jobs", "0"], "jobs: must be at least 1; found 0\n"),
        (["--jobs", "-2"], "jobs: must be at least 1; found -2\n"),
        (["--jobs", "3", "--on", "ray"], "jobs: are processes of this machine; leave it out with --on ray"),
        (["--methods"], "methods: must be all, paper, or some of fisher-mask"),
    ],
)
def test_a_run_that_would_do_nothing_is_refused(arguments, message, capsys, tmp_path):
    assert cli.main(["bench", "run", "table1", "--out", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"expunge: {message}") and list(tmp_path.iterdir()) == []


def test_mistakes_exit_with_two(capsys):
    assert cli.main(["bench", "run", "table9"]) == 2
    assert capsys.readouterr().err.startswith("expunge: experiments: must be all, or some of table1, table2")


@pytest.mark.parametrize(
    "model, message",
    [
        ("digits/resnet9", "the network must be one of resnet8, .*; found digits/resnet9"),
        ("nope/resnet8", "the dataset must be one of digits, cifar10, .*; found nope/resnet8"),
        ("digits", "must be DATASET/NETWORK, such as cifar10/vgg16; found digits"),
    ],
)
def test_unknown_models_are_refused_at_once(capsys, tmp_path, model, message):
    assert cli.main(["bench", "run", "table1", "--models", model, "--out", str(tmp_path)]) == 2
    assert re.fullmatch(f"expunge: models: {message}\n", capsys.readouterr().err) and list(tmp_path.iterdir()) == []
