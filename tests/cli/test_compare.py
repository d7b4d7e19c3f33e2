"""`expunge demo` and `expunge compare`: from end to end, stopped and resumed, unread, and asked for what they cannot do."""

import json

import pytest

from expunge import __version__
from expunge.cli import commands as cli
from expunge.experiments import construction, networks, runner
from expunge.report import comparison as comparison_report
from expunge.vision.zoo import load_network
from tests.experiments.tiny import few_digits

COMPARED = ["compare", "--epochs", "2", "--tuning-epochs", "1", "--jobs", "1", "--methods"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    few_digits(monkeypatch)
    yield
    construction.parts.cache_clear()


def methods_in(folder):
    result = json.loads((folder / "result.json").read_text())
    return [each["cell"]["method"]["name"] for each in result["results"]]


def test_the_demo_from_end_to_end(capsys, tmp_path):
    out = tmp_path / "deep" / "folder"
    assert cli.main(["demo", "--seed", "1", "--label", "3", "--epochs", "2", "--tuning-epochs", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    for name in ("before", "Finetune", "MaskClassifier", "RandomMask", "FisherMask, chosen", "Retrain", "λ = "):
        assert name in printed.out
    assert max(map(len, printed.out.splitlines()[:-1])) <= 80 and "fisher-mask ratio=0.02 seed=1" in printed.err
    result = json.loads((out / "result.json").read_text())
    assert result["settings"]["label"] == 3 and result["results"][0]["versions"]["expunge"] == __version__
    assert methods_in(out) == [
        "original",
        "finetune",
        "mask-classifier",
        "random-mask",
        "fisher-mask",
        "fisher-mask",
        "reset-and-distil",
        "retrain",
    ]
    for each in result["results"][1:]:
        assert 0 <= each["best"]["unlearn_score"] <= 1 and each["work_seconds"] > 0
    files = {path.name for path in out.iterdir() if path.is_file()}
    assert files == {*result["files"]} and "fisher-mask-chosen.safetensors" in files and "original.safetensors" in files
    for name in files:
        if name.endswith(".safetensors"):
            assert load_network(out / name).classifier.out_features == 10
    assert "<html" in (out / "page.html").read_text()


def test_what_is_done_is_not_done_again(capsys, tmp_path, monkeypatch):
    assert cli.main([*COMPARED, "ssd", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr()
    done = []
    perform = runner.perform
    monkeypatch.setattr(runner, "perform", lambda cell, *rest: done.append(cell.method["name"]) or perform(cell, *rest))
    monkeypatch.setattr(networks, "train_networks", lambda *arguments, **others: pytest.fail("trained again"))
    assert cli.main([*COMPARED, "ssd", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first.out and done == []
    assert cli.main([*COMPARED, "ssd", "finetune", "--out", str(tmp_path)]) == 0 and done == ["finetune"]
    assert methods_in(tmp_path) == ["original", "ssd", "finetune", "retrain"]


def test_networks_asked_for_later_are_made(capsys, tmp_path):
    assert cli.main([*COMPARED, "ssd", "--out", str(tmp_path)]) == 0 and not list(tmp_path.glob("*.safetensors"))
    assert cli.main([*COMPARED, "ssd", "--models", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"original.safetensors", "ssd.safetensors", "retrain.safetensors"}
    assert cli.main([*COMPARED, "ssd", "--out", str(tmp_path)]) == 0 and not list(tmp_path.glob("*.safetensors"))


def test_a_comparison_from_end_to_end(capsys, tmp_path):
    asked = ["ssd", "mask-classifier", "fisher-mask-released", "--label", "3", "5", "--out", str(tmp_path)]
    assert cli.main([*COMPARED, *asked]) == 0
    printed = capsys.readouterr()
    shown = [line.split("  ")[0] for line in printed.out.splitlines()]
    assert shown.index("before") < shown.index("SSD") < shown.index("FisherMask, released") < shown.index("Retrain")
    assert "mask-classifier: label: must be given where the forget set holds several labels; found [3, 5]" in printed.out
    refused = "mask-classifier: label"
    assert max(len(line) for line in printed.out.splitlines()[:-1] if not line.startswith(refused)) <= 80
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["finished"] and result["settings"]["label"] == [3, 5]
    assert result["results"][1]["setting"].startswith("SSD(threshold=")
    assert result["results"][2]["error"].startswith("label: must be given")


def test_without_remain_data_methods_run_or_say_why_not(capsys, tmp_path):
    asked = ["fisher-mask", "finetune", "--scenario", "subset", "--no-remain", "--quiet", "--out", str(tmp_path)]
    assert cli.main([*COMPARED, *asked]) == 0
    printed = capsys.readouterr()
    assert "finetune: remain: Finetune needs the data to keep" in printed.out and printed.err == ""
    assert json.loads((tmp_path / "result.json").read_text())["scenario"]["remain"] == 0


def test_a_comparison_that_is_stopped_tells_what_it_has_done_and_goes_on(capsys, monkeypatch, tmp_path):
    perform = runner.perform

    def interrupted(cell, *rest):
        if cell.method["name"] == "finetune":
            raise KeyboardInterrupt
        return perform(cell, *rest)

    asked = [*COMPARED, "random-mask", "finetune", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "perform", interrupted)
        assert cli.main(asked) == 130
    printed = capsys.readouterr()
    assert "RandomMask" in printed.out and "(2 of 4 done)" in printed.out and printed.err.endswith("expunge: stopped\n")
    assert not json.loads((tmp_path / "result.json").read_text())["finished"] and methods_in(tmp_path) == ["original", "random-mask"]
    assert cli.main(asked) == 0 and methods_in(tmp_path) == ["original", "random-mask", "finetune", "retrain"]
    assert json.loads((tmp_path / "result.json").read_text())["finished"]


def test_a_comparison_that_nobody_reads_is_saved(monkeypatch, tmp_path):
    def nobody(*arguments, **others):
        raise BrokenPipeError

    monkeypatch.setattr(comparison_report, "show", nobody)
    assert cli.main([*COMPARED, "ssd", "--quiet", "--out", str(tmp_path)]) == 141
    assert json.loads((tmp_path / "result.json").read_text())["finished"]


def test_a_comparison_stopped_at_its_start_shows_nothing(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(networks, "train_networks", interrupted)
    assert cli.main([*COMPARED, "ssd", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().out == "" and not list(tmp_path.glob("*.*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--methods", "nonsense"], "methods: must be all, released, or some of fisher-mask, "),
        (["--scenario", "subset", "--label", "3"], "label: is for the scenario category; found subset"),
        (["--label", "12"], "label: must occur in the dataset; found 12"),
        (["--methods"], "methods: must be all, released, or some of fisher-mask, "),
        (["--tuning-epochs", "0"], "tuning_epochs: must be at least 1; found 0"),
        (["--epochs", "0"], "epochs: must be at least 1; found 0"),
        (["--remain-fraction", "2"], "remain_fraction: must be a share of the 182 training samples, of which 163 remain; found 2.0"),
        (["--remain-fraction", "0.95"], "remain_fraction: must be a share of the 182 training samples, of which 163 remain; found 0.95"),
    ],
)
def test_mistakes_in_a_comparison_are_told_before_anything_is_trained(arguments, message, capsys, tmp_path):
    assert cli.main(["compare", *arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"expunge: {message}") and list(tmp_path.iterdir()) == []
