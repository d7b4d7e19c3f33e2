"""The command line: quick help, one-line errors, and progress."""

import errno
import os
import resource
import subprocess
import sys

import pytest

import expunge.experiments.comparison
from expunge.cli import commands as cli
from expunge.runtime.progress import track

CALL = "import sys; from expunge.cli import main; sys.exit(main(sys.argv[1:]))"


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["compare", "--help"], ["train", "--help"], ["--version"]])
def test_help_answers_in_half_a_second(arguments):
    """Of a processor's time: other work on the machine is not the command's."""
    taken = []
    for _ in range(3):
        started = processor_seconds()
        finished = subprocess.run([sys.executable, "-c", CALL, *arguments], capture_output=True, text=True)
        taken.append(processor_seconds() - started)
        assert finished.returncode == 0 and "expunge" in finished.stdout
    assert min(taken) < 0.5, taken


def test_help_names_values_by_what_to_type(capsys):
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        usage, *lines = capsys.readouterr().out.splitlines()
        assert not any("{None" in line for line in lines), command
        named = {"undo": "FOLDER", "prove": "FOLDER", "verify": "RECEIPT", "report": "RESULTS"}.get(command)
        assert named is None or f"] {named}" in usage


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["compare", "--help"], ["train", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments):
    program = f"""
import sys
from expunge.cli.commands import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert stop.code == 0
assert not {{"torch", "numpy", "matplotlib"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"expunge {expunge.__version__}\n"


def test_unknown_commands_exit_with_two(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["nonsense"])
    assert stop.value.code == 2


def test_our_errors_are_one_line_and_exit_code_two(capsys, tmp_path):
    assert cli.main(["demo", "--label", "12", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "expunge: label: must occur in the dataset; found 12\n"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_a_short_line_and_exit_code_130(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "expunge: stopped\n"


@pytest.mark.parametrize(
    "error, code, line",
    [
        (OSError(errno.ENOSPC, "No space left on device", "/some/file"), 1, "expunge: /some/file: No space left on device\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "expunge: No space left on device\n"),
        (OSError("no number"), 1, "expunge: no number\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
    ],
)
def test_what_the_system_refuses_is_one_line(error, code, line, capsys, monkeypatch):
    def refused(options):
        raise error

    monkeypatch.setattr(cli, "run_demo", refused)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "list", "table1"]])
def test_a_reader_that_is_gone_is_no_error(arguments):
    with subprocess.Popen([sys.executable, "-c", CALL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode in (0, 141)


def test_a_terminal_without_our_characters_gets_question_marks(tmp_path):
    program = (
        "import sys; from expunge.cli import commands as cli; cli.run_demo = lambda options: print('λ × Δ'); sys.exit(cli.main(['demo']))"
    )
    asked = {"env": os.environ | {"PYTHONIOENCODING": "ascii"}, "capture_output": True, "text": True}
    finished = subprocess.run([sys.executable, "-c", program], **asked)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "? ? ?\n", "")


def test_ctrl_c_while_modules_are_imported_is_a_short_line(capsys, monkeypatch):
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "expunge.experiments.comparison":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "expunge.experiments.comparison")
    monkeypatch.delattr(expunge.experiments, "comparison")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "expunge: stopped\n"


@pytest.mark.parametrize(
    "command", [["demo", "--seed"], ["compare", "--seed"], ["train", "--seed"], ["train", "--seeds"], ["bench", "list", "--seeds"]]
)
def test_a_seed_that_is_too_large_is_refused(command, capsys, tmp_path):
    assert cli.main([*command, "99999999999999999999", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"expunge: {command[-1][2:]}: must be in [-2^63, 2^63); found 99999999999999999999\n"
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_hidden(monkeypatch):
    def broken(options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "run_demo", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    "command", [["demo"], ["compare"], ["train"], ["bench", "run", "table1"], ["bench", "adopt", "x"], ["data", "get", "mnist"]]
)
@pytest.mark.parametrize("out", ["", "file", "file/below", "closed/below"])
def test_a_folder_that_cannot_be_written_is_told_before_the_work(command, out, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("closed"))  # root may write everywhere
    option = "data" if command[0] == "data" else "out"
    assert cli.main([*command, f"--{option}", str(tmp_path / out) if out else ""]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"expunge: {option}: must be a folder") and told.err.count("\n") == 1


@pytest.mark.parametrize("out", ["", ".", "file/page.html", "closed/page.html"])
def test_a_page_that_cannot_be_written_is_told_before_the_work(out, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("closed"))
    assert cli.main(["report", "nothere", "-o", out]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("expunge: out: must be ") and told.err.count("\n") == 1


def test_progress_off_a_terminal_is_one_line_at_the_end(capsys):
    assert list(track(range(3), "counting", enabled=True)) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("counting: 3 steps, ") and captured.err.count("\n") == 1
    assert list(track(iter("ab"), "silent")) == ["a", "b"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("without_rich", [True, False])
def test_progress_on_a_terminal_draws_and_stops_cleanly(capsys, monkeypatch, without_rich):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if without_rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(track(range(3), "counting", enabled=True)) == [0, 1, 2]
    unfinished = track(range(3), "breaking off", enabled=True)
    next(unfinished)
    unfinished.close()
    shown = capsys.readouterr().err
    assert "counting" in shown and ("3/3" in shown or "100%" in shown)
