"""The command line: quick help, one-line errors, and the demonstration from end to end."""

import itertools
import json
import subprocess
import sys
import time

import pytest
from safetensors import safe_open

import expunge
from expunge import cli, comparison, demo, demo_report
from expunge.metrics import Relearning
from expunge.progress import track
from expunge.tuning import Constant, Tuning

CALL = "import sys; from expunge.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["compare", "--help"], ["--version"]])
def test_help_answers_in_half_a_second(arguments):
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        finished = subprocess.run([sys.executable, "-c", CALL, *arguments], capture_output=True, text=True)
        taken.append(time.perf_counter() - started)
        assert finished.returncode == 0 and "expunge" in finished.stdout
    assert min(taken) < 0.5, taken


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["compare", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments):
    program = f"""
import sys
from expunge.cli import main
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


def test_other_errors_are_not_hidden(monkeypatch):
    def broken(options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "run_demo", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


def test_the_demo_from_end_to_end(capsys, tmp_path):
    out = tmp_path / "deep" / "folder"
    assert cli.main(["demo", "--seed", "1", "--label", "3", "--epochs", "2", "--tuning-epochs", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    for name in ("before", "Finetune", "MaskClassifier", "RandomMask", demo.TEXT, "FisherMask λ=", demo.REFERENCE, "speed-up"):
        assert name in printed.out
    assert "forgetting 3" in printed.err and "training: 68 steps" in printed.err
    result = json.loads((out / "result.json").read_text())
    assert result["settings"]["label"] == 3 and result["versions"]["expunge"] == expunge.__version__
    assert [row["name"] for row in result["rows"]][-1] == demo.REFERENCE
    for row in result["rows"]:
        assert 0 <= row["final"]["unlearn_score"] <= 1 and row["seconds"] > 0
        with safe_open(out / row["model"], framework="pt") as file:
            assert "classifier.weight" in file.keys() and file.metadata()["kind"] == "model"
    assert (out / "before.safetensors").exists()
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")


COMPARED = ["compare", "--epochs", "2", "--tuning-epochs", "1", "--methods"]


@pytest.fixture
def soon_given_up(monkeypatch):
    """Re-learning, which is most of the time of so short a comparison."""
    monkeypatch.setattr(comparison, "RELEARNING", Relearning(Tuning(Constant(0.05, 1))))


def test_a_comparison_from_end_to_end(capsys, tmp_path, soon_given_up):
    asked = ["ssd", "mask-classifier", "fisher-mask-released", "--label", "3", "5", "--models", "--out", str(tmp_path)]
    assert cli.main([*COMPARED, *asked]) == 0
    printed = capsys.readouterr()
    names = ["before", "ssd", "fisher-mask-released", "retrain"]
    shown = [line.split()[0] for line in printed.out.splitlines() if line.split() and line.split()[0] in names]
    assert shown[:4] == names
    assert "not here: mask-classifier: label: must be given where the forget set holds several labels; found [3, 5]" in printed.out
    assert "without classes 3, 5: 5 steps" in printed.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["finished"] and [row["name"] for row in result["rows"]] == names
    assert result["settings"]["label"] == [3, 5] and result["rows"][1]["setting"].startswith("SSD(threshold=")
    assert (tmp_path / "tradeoff.png").exists() and (tmp_path / "ssd.safetensors").exists()


def test_without_remain_data_methods_run_or_say_why_not(capsys, tmp_path, soon_given_up):
    asked = ["fisher-mask", "finetune", "--scenario", "subset", "--no-remain", "--quiet", "--out", str(tmp_path)]
    assert cli.main([*COMPARED, *asked]) == 0
    printed = capsys.readouterr()
    assert "not here: finetune: remain: Finetune needs the data to keep" in printed.out and printed.err == ""
    assert json.loads((tmp_path / "result.json").read_text())["scenario"]["remain"] == 0
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_comparison_that_is_stopped_tells_what_it_has_found(capsys, monkeypatch, tmp_path, soon_given_up):
    every = comparison.rows

    def interrupted(*arguments):
        yield from itertools.islice(every(*arguments), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "rows", interrupted)
    assert cli.main([*COMPARED, "random-mask", "finetune", "--out", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert "random-mask" in printed.out and "finetune" not in printed.out and "stopped: what was done so far" in printed.out
    assert printed.err.endswith("expunge: stopped\n")
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["finished"] and [row["name"] for row in result["rows"]] == ["before", "random-mask", "retrain"]


def test_a_comparison_stopped_at_its_start_leaves_nothing(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "trained", interrupted)
    assert cli.main(["compare", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--methods", "nonsense"], "methods: must be all, released, or some of fisher-mask, "),
        (["--scenario", "subset", "--label", "3"], "label: is for the scenario category; found subset"),
        (["--label", "12"], "label: must occur in the dataset; found 12"),
    ],
)
def test_mistakes_in_a_comparison_are_told_before_anything_is_trained(arguments, message, capsys, tmp_path):
    assert cli.main(["compare", *arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"expunge: {message}") and list(tmp_path.iterdir()) == []


def test_the_table_has_a_line_for_every_method_and_says_when_the_text_fails():
    good, bad = demo.Accuracies(0.98, 0.0), demo.Accuracies(0.97, 0.5)
    rows = [demo.Row(demo.TEXT, bad, bad, 5, 2.0, None), demo.Row(demo.REFERENCE, None, good, 20, 8.0, None)]
    lines = demo_report.table(demo.Accuracies(0.99, 1.0), rows).splitlines()
    assert lines[-2].split() == ["FisherMask,", "the", "text", "97.0", "50.0", "64.7", "97.0", "50.0", "64.7", "5", "2.00", "4.0x"]
    assert len({len(line) for line in lines[-2:]}) == 1
    assert "50.0 % forget accuracy is left" in demo_report.notes(rows)
    assert "fails" not in demo_report.notes([demo.Row(demo.TEXT, bad, good, 5, 2.0, None), rows[1]])


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
