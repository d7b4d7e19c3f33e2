"""Where a request cannot be served: one clear line, nothing changed, and the same command works once it can.

Tests may run as root, whom no permission stops: what cannot be written is a disk that is mounted read-only, /proc, and a path below a file.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import expunge
from expunge.cli import commands as cli
from tests.disks import read_only, small_disk
from tests.requests.small import TASK, request, write_task

ASKED = ["unlearn", "--task", "mytask.py", "--weights", "model.safetensors", "--method", "fisher-mask", "--set", "ratio=0.1", "tuning=None"]
ASKED += ["--threads", "1", "--no-audit", "--quiet"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    request(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def told(capsys):
    """The one line that a command has printed."""
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


def test_a_disk_that_is_read_only(here, capsys):
    with small_disk(here, 400_000) as disk:
        assert cli.main([*ASKED, "--forget", "0-3", "--out", "disk/out"]) == 0
        assert cli.main(["fisher", "build", *ASKED[1:5], "--threads", "1", "--quiet", "--out", "disk/sums"]) == 0
        capsys.readouterr()
        before = contents(here)
        with read_only(disk):
            for out in ("disk/out", "disk/new", "disk/new/deep"):
                assert cli.main([*ASKED, "--forget", "7", "--out", out]) == 2
                assert told(capsys).startswith("expunge: out: must be a folder that is writable, and ")
            assert cli.main([*ASKED, "--forget", "7", "--out", "elsewhere", "--sums", "disk/sums"]) == 2
            assert told(capsys).startswith("expunge: sums: must be a folder that is writable, and ")
            for command in (
                ["undo", "disk/out", "--out", "disk/back.safetensors"],
                ["prove", "disk/out", "--id", "1", "--out", "disk/p.json"],
            ):
                assert cli.main(command) == 2
                assert told(capsys).startswith("expunge: out: must be a folder that is writable, and ")
            assert cli.main(["verify", "disk/out/receipt.json", "--task", "mytask.py"]) == 0  # reading is enough for it
            capsys.readouterr()
        assert contents(here) == before and not (here / "elsewhere").exists()
        assert cli.main([*ASKED, "--forget", "7", "--out", "disk/out"]) == 0


@pytest.mark.parametrize(
    "out, code, line",
    [("mytask.py/out", 2, "expunge: out: must be a folder, and "), ("/proc/expunge-out", 1, "expunge: /proc/.expunge-out.expunge-lock: ")],
)
def test_a_place_where_nobody_can_write(out, code, line, here, capsys):
    before = contents(here)
    assert cli.main([*ASKED, "--forget", "7", "--out", out]) == code
    assert told(capsys).startswith(line) and contents(here) == before


def test_a_disk_that_is_full(here, capsys):
    with small_disk(here, 160_000) as disk:
        assert cli.main([*ASKED, "--forget", "0-3", "--out", "disk/out"]) == 0
        capsys.readouterr()
        before = contents(disk)
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 12_000))
        assert cli.main([*ASKED, "--forget", "9", "--out", "disk/out"]) == 1
        line = told(capsys)
        assert line.startswith("expunge: disk/out/") and line.endswith(": No space left on device\n")
        (disk / "ballast").unlink()
        assert contents(disk) == before
        assert cli.main([*ASKED, "--forget", "9", "--out", "disk/out"]) == 0


def test_samples_that_are_validation_data(here, capsys):
    validation = "\n\ndef validation():\n    return torch.utils.data.Subset(points(120, 1), range(30))\n"
    write_task(here, TASK + validation)
    before = contents(here)
    asked = [*ASKED[: ASKED.index("--method")], "--forget", "20-40", "--out", "out", "--no-audit"]  # chosen, so by the validation data
    assert cli.main([*asked, "--dry-run"]) == 2
    assert told(capsys).startswith("expunge: forget: must not name samples of the validation data, which validation() returns too; found ")
    assert contents(here) == before


def test_samples_that_are_test_data(here, capsys):
    write_task(here, TASK.replace("return points(40, 2)", "return torch.utils.data.Subset(points(120, 1), range(30))"))
    before = contents(here)
    assert cli.main([*ASKED, "--forget", "20-40", "--out", "out"]) == 2
    assert told(capsys).startswith("expunge: forget: must not name samples of the test data, which test() returns too; found ")
    assert contents(here) == before


WAITS = TASK + "\nimport pathlib, time\npathlib.Path('begun').touch()\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)\n"


@pytest.mark.slow
def test_two_requests_at_once(here, capsys):
    """Of two processes the second is refused while the first is at it, and comes to its turn after."""
    write_task(here, WAITS, "waits.py")
    environment = os.environ | {"PYTHONPATH": str(Path(expunge.__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
    first = [*ASKED[:2], "waits.py", *ASKED[3:], "--forget", "0-3", "--out", "out"]
    running = subprocess.Popen([sys.executable, "-m", "expunge", *first], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        while not (here / "begun").exists() and running.poll() is None:
            time.sleep(0.05)
        assert cli.main([*ASKED, "--forget", "9", "--out", "out"]) == 2
        assert told(capsys) == "expunge: out: must not be in use: another command is writing there; found out\n"
        assert not (here / "out").exists()
        (here / "go").touch()
        assert "request 1: 4 of 120 samples" in running.communicate(timeout=120)[0] and running.returncode == 0
    finally:
        running.kill()
        running.wait()
    assert cli.main([*ASKED, "--forget", "9", "--out", "out"]) == 0
    assert "request 2: 5 of 120 samples" in capsys.readouterr().out
