"""A small part of `make fuzz`, and whether it would notice anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from random import Random

import pytest

import expunge
from expunge.errors import InputError
from tests.fuzz import mutations, run
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="memory is measured by Linux's /proc")


@pytest.mark.slow
def test_some_hundred_changed_files_are_read_or_refused(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(expunge.__file__))}
    command = [sys.executable, "-m", "tests.fuzz.run", "--cases", "300", "--seed", "2", "--jobs", "1", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=run.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "300 files" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("name", TARGETS)
def test_the_good_files_are_read(name, tmp_path):
    for path, content in TARGETS[name].good().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / TARGETS[name].name_of(path, content)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / TARGETS[name].name_of(path, content)).write_bytes(content)
    TARGETS[name].read(tmp_path, Random(1))  # whose first number lets published checksums be


def raising(error):
    def read():
        raise error

    return read


ENDINGS = {
    "read": (lambda: None, run.READ),
    "refused": (raising(InputError("path", "must be good")), run.REFUSED),
    "no file": (raising(FileNotFoundError(2, "No such file")), run.REFUSED),
    "no word": (raising(OSError()), "an error of 0 lines"),
    "two lines": (raising(InputError("path", "must\nbe good")), "an error of 2 lines"),
    "raw": (raising(KeyError("settings")), "KeyError"),
    "recursion": (lambda: json.loads("[" * 100_000), "RecursionError"),
    "memory": (lambda: bytearray(b"x") * (run.MEMORY + 2**20), "MiB of memory"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_endings_are_told_apart(name):
    read, ending = ENDINGS[name]
    assert run.outcome(read)["outcome"].endswith(ending)


class Fake(run.Watched):
    """In place of a reader a program that begins its first file and then does this."""

    program = ""

    def start(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        run.case_file(self.folder, self.next).write_bytes(b"the file")
        begin = json.dumps({"begin": self.next, "target": "any"})
        self.process = subprocess.Popen([sys.executable, "-c", f"print({begin!r}, flush=True)\n{self.program}"], stdout=subprocess.PIPE)
        self.folder.with_suffix(".stderr").write_text("its last words")
        self.heard, self.begun, self.deadline = b"", {}, time.monotonic() + run.START


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process ended with -11"),
        ("import time; time.sleep(100)", "nothing within"),
    ],
)
def test_crashes_and_hangs_are_noticed_and_their_files_kept(program, told, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TIMEOUT", 0.3)
    report, worker = run.Report(tmp_path / "kept"), Fake(run.arguments(["--cases", "2"]), 0, 1, tmp_path / "work" / "0")
    worker.program = program
    run.watch([worker], report)
    assert len(report.failures) == 2 and all(told in failure and "its last words" in failure for failure in report.failures)
    assert [path.read_bytes() for path in sorted((tmp_path / "kept").iterdir())] == [b"the file"] * 2


def test_a_case_does_not_depend_on_those_before():
    before = repr(mutations.ODD)
    for number in range(2000):
        mutations.edited(Random(number), {"a": [1, {"b": 2}], "c": 0.5})
    assert repr(mutations.ODD) == before
