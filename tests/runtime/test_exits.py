"""Ctrl-C is heard at any moment, ends a command with 130 and one line, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from expunge.errors import InputError
from expunge.experiments.processes import deaf_to_ctrl_c
from expunge.runtime.exits import ended, uninterrupted

heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job, as these tests may be, begins deaf to it


@pytest.fixture(autouse=True)
def listening():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_raised_at_the_end():
    steps = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        except BaseException:  # as the import of a module that has a plan for everything
            pytest.fail("must not be raised here")
        steps.append("went on")
    assert steps == ["went on"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_errors_are_raised_as_they_are():
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_does_not_hear_ctrl_c_stays_deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_another_thread_may_import_too():
    failed = []

    def importing():
        try:
            with uninterrupted():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=importing)
    thread.start()
    thread.join()
    assert failed == []


@pytest.mark.parametrize("threads", [0, 2])
def test_while_processes_are_started_ctrl_c_waits_and_they_do_not_hear_it(threads):
    """Any thread may be given the signal: those that compute do not block it."""
    done = threading.Event()
    for _ in range(threads):
        threading.Thread(target=done.wait, daemon=True).start()
    children = []
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('deaf')"
    try:
        with pytest.raises(KeyboardInterrupt), deaf_to_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            children.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
    finally:
        done.set()
    assert [child.communicate()[0] for child in children] == [b"deaf\n"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_within_an_exec_ends_with_130():
    """CPython would end by the signal, though it was caught."""
    program = "import sys; from expunge.runtime.exits import ended; sys.exit(ended(lambda: exec('raise KeyboardInterrupt')))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (130, "expunge: stopped\n")
    assert ended(lambda: 3) == 3


BENCH = ["bench", "run", "table1", "--jobs", "2"]
READY = "import sys; from expunge.__main__ import main; print('ready', flush=True); sys.exit(main())"


@pytest.mark.parametrize(
    "command, seconds", [(BENCH, 0.05), (BENCH, 0.5), (BENCH, 1.5), (["demo"], 0.5), (["compare"], 0.5), (["train"], 0.5)]
)
@pytest.mark.slow
def test_ctrl_c_in_the_first_moments(command, seconds, tmp_path):
    """To the whole group, as from a terminal, while modules are imported or processes started."""
    asked = [sys.executable, "-c", READY, *command, "--out", str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runner = subprocess.Popen(asked, **pipes, start_new_session=True, preexec_fn=heard)
    with runner.stdout:
        assert runner.stdout.readline() == "ready\n"
    time.sleep(seconds)
    os.killpg(runner.pid, signal.SIGINT)
    with runner.stderr:
        lines = runner.stderr.read().splitlines()  # ends with the last process that holds it
    assert runner.wait() == 130 and lines[-1] == "expunge: stopped" and not any("Traceback" in line for line in lines)
    with pytest.raises(ProcessLookupError):
        os.killpg(runner.pid, 0)


def test_ctrl_c_while_the_command_line_is_imported(tmp_path):
    program = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "expunge.cli.bench":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from expunge.__main__ import main
sys.exit(main())
"""
    finished = subprocess.run([sys.executable, "-c", program, "demo"], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (130, "expunge: stopped\n")


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [("--version", ">&-", 0), ("--help", ">&-", 0), ("bench list", ">&- 2>&-", 0), ("report nowhere", "2>&-", 2)],
)
@pytest.mark.slow
def test_streams_that_are_closed_are_not_written(arguments, closed, code, tmp_path):
    command = f"{sys.executable} -m expunge {arguments} {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr + done.stdout


def test_an_error_is_one_line_whatever_a_file_is_called(capsys):
    def refuse():
        raise InputError("data", "a\nb\x1b[31m: must be a picture", "\udcff λ\r")

    assert ended(refuse) == 2
    assert capsys.readouterr().err == "expunge: data: a\\nb\\x1b[31m: must be a picture; found \\udcff λ\\r\n"
