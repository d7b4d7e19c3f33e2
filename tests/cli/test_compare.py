"""`expunge compare`: from end to end, stopped, unread, and asked for what it cannot do."""

import itertools
import json

import pytest

from expunge.cli import commands as cli
from expunge.experiments import comparison, demo
from expunge.metrics import Relearning
from expunge.report import comparison as comparison_report
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.vision import zoo as training

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
    assert (tmp_path / "tradeoff.png").exists()
    assert training.load_network(tmp_path / "ssd.safetensors").classifier.out_features == 10


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
    assert not (tmp_path / "result.json").exists()  # where a whole one may be
    result = json.loads((tmp_path / "stopped" / "result.json").read_text())
    assert not result["finished"] and [row["name"] for row in result["rows"]] == ["before", "random-mask", "retrain"]


def test_a_comparison_that_nobody_reads_is_saved(monkeypatch, tmp_path, soon_given_up):
    def nobody(*arguments, **others):
        raise BrokenPipeError

    monkeypatch.setattr(comparison_report, "table", nobody)
    assert cli.main([*COMPARED, "ssd", "--quiet", "--out", str(tmp_path)]) == 141
    assert json.loads((tmp_path / "result.json").read_text())["finished"]


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
        (["--methods"], "methods: must be all, released, or some of fisher-mask, "),
        (["--tuning-epochs", "0"], "tuning_epochs: must be at least 1; found 0"),
        (["--epochs", "0"], "epochs: must be at least 1; found 0"),
        (["--remain-fraction", "2"], "remain_fraction: must be a share of the 1078 training samples, of which 971 remain; found 2.0"),
        (["--remain-fraction", "0.95"], "remain_fraction: must be a share of the 1078 training samples, of which 971 remain; found 0.95"),
    ],
)
def test_mistakes_in_a_comparison_are_told_before_anything_is_trained(arguments, message, capsys, tmp_path):
    assert cli.main(["compare", *arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"expunge: {message}") and list(tmp_path.iterdir()) == []
