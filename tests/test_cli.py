"""The command line: quick help, one-line errors, and the demonstration from end to end."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors import safe_open

import expunge
from expunge import cli, comparison, comparison_report, demo, demo_report, training_report
from expunge.bench.locks import held
from expunge.metrics import Relearning
from expunge.progress import track
from expunge.tuning import Constant, Tuning
from expunge.vision import recipes, training

CALL = "import sys; from expunge.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["compare", "--help"], ["train", "--help"], ["--version"]])
def test_help_answers_in_half_a_second(arguments):
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        finished = subprocess.run([sys.executable, "-c", CALL, *arguments], capture_output=True, text=True)
        taken.append(time.perf_counter() - started)
        assert finished.returncode == 0 and "expunge" in finished.stdout
    assert min(taken) < 0.5, taken


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["compare", "--help"], ["train", "--help"], ["--version"]])
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
    program = "import sys; from expunge import cli; cli.run_demo = lambda options: print('λ × Δ'); sys.exit(cli.main(['demo']))"
    asked = {"env": os.environ | {"PYTHONIOENCODING": "ascii"}, "capture_output": True, "text": True}
    finished = subprocess.run([sys.executable, "-c", program], **asked)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "? ? ?\n", "")


def test_ctrl_c_while_modules_are_imported_is_a_short_line(capsys, monkeypatch):
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "expunge.demo":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "expunge.demo")
    monkeypatch.delattr(expunge, "demo")
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
        assert training.load_network(out / row["model"]).classifier.out_features == 10
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


TRAINED = ["train", "--network", "resnet8", "--batch-size", "128", "--epochs"]


def test_a_training_from_end_to_end(capsys, tmp_path):
    assert cli.main([*TRAINED, "2", "--seeds", "3,4", "--without", "5", "--augment", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    assert told[0].startswith(
        "resnet8 on digits: 2 epochs, batches of 128, rate 0.1, ×0.1 after 1 and 1.5, momentum 0.9, weight decay 0.004"
    )
    assert "cropped and mirrored at random" in told[0] and "not in the paper" in told[0]
    names = [f"digits-resnet8-without5-augmented-seed{seed}" for seed in (3, 4)]
    assert [line.split(",")[0] for line in told[1:]] == [f"{name}: epoch {epoch}/2" for epoch in (1, 2) for name in names]
    assert all("loss " in line and "remain " in line and "forget 0.00 %" in line for line in told[1:])
    assert told[1].endswith(" left") and told[-1].endswith(", done")
    for name, line in zip(names, printed.out.splitlines(), strict=False):
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert line.startswith(f"{name}: loss ") and line.endswith(f"weights {result['digest']}")
        assert (result["precision"], result["without"], len(result["curve"])) == ("float32", 5, 2)
        assert training.weights_digest(training.load_network(tmp_path / f"{name}.safetensors")) == result["digest"]


def test_a_training_killed_goes_on_and_ends_with_the_same_weights(capsys, tmp_path):
    asked = [*TRAINED, "4", "--quiet", "--out"]
    child = subprocess.Popen([sys.executable, "-c", CALL, *asked, str(tmp_path / "killed")], env=os.environ | {"OMP_NUM_THREADS": "1"})
    state = tmp_path / "killed" / "digits-resnet8-seed0.training.safetensors"
    while child.poll() is None and not state.exists():
        time.sleep(0.01)
    time.sleep(0.1)  # somewhere in the second epoch
    child.kill()
    assert child.wait() == -signal.SIGKILL and not (tmp_path / "killed" / "digits-resnet8-seed0.safetensors").exists()
    assert cli.main([*asked, str(tmp_path / "killed")]) == 0
    assert cli.main([*asked, str(tmp_path / "whole")]) == 0
    printed = capsys.readouterr()
    gone_on, at_a_stretch = (line for line in printed.out.splitlines() if "weights " in line)
    assert gone_on == at_a_stretch and printed.err == ""
    written = [(tmp_path / folder / "digits-resnet8-seed0.json").read_text() for folder in ("killed", "whole")]
    assert written[0] == written[1] and len(json.loads(written[0])["curve"]) == 4


def test_ctrl_c_says_how_a_training_goes_on(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train_networks", interrupted)
    assert cli.main(["train", "--quiet", "--out", str(tmp_path)]) == 130
    said = f"The state after the last whole epoch is in {tmp_path}/; the same command goes on from there.\nexpunge: stopped\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--network", "nonsense"], "network: must be one of resnet8"),
        (["--dataset", "nonsense"], "dataset: must be one of digits"),
        (["--seeds", "1,x"], "seeds: must be whole numbers with commas between them; found 1,x"),
        (["--rate=-1"], "rate: must be positive, and finite; found -1.0"),
        (["--rate", "inf"], "rate: must be positive, and finite; found inf"),
        (["--weight-decay=-1"], "weight_decay: must be zero or positive, and finite; found -1.0"),
        (["--weight-decay=nan"], "weight_decay: must be zero or positive, and finite; found nan"),
        (["--batch-size", "0"], "batch_size: must be positive, and finite; found 0"),
        (["--without", "11"], "without: must occur in the dataset; found 11"),
        (["--device", "nonsense"], "device: must be one that torch finds here"),
        (["--compile", "--device", "cpu"], "compile: is for a GPU; found cpu"),
    ],
)
def test_mistakes_in_a_training_are_told_before_it_begins(arguments, message, capsys, tmp_path):
    assert cli.main(["train", *arguments, "--quiet", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"expunge: {message}") and list(tmp_path.iterdir()) == []


def test_two_trainings_of_one_name_do_not_run_at_once(capsys, tmp_path):
    with held(tmp_path / "locks" / "digits-resnet8-seed0.lock"):
        assert cli.main([*TRAINED, "1", "--quiet", "--out", str(tmp_path)]) == 2
        rule = "out: must not be in use: another training of this name is running there"
        assert capsys.readouterr().err == f"expunge: {rule}; found {tmp_path}/digits-resnet8-seed0\n"
        assert not list(tmp_path.glob("*.*"))
        assert cli.main([*TRAINED, "1", "--seed", "1", "--quiet", "--out", str(tmp_path)]) == 0
    assert cli.main([*TRAINED, "1", "--quiet", "--out", str(tmp_path)]) == 0


def test_a_recipe_is_told_in_one_line():
    told = training_report.told(recipes.RECIPES["tiny-imagenet"])
    expected = "160 epochs, batches of 32, rate 0.1, ×0.1 after 80 and 120, rising over the first 20, momentum 0.9, weight decay 0.0001"
    assert told == f"{expected}, no augmentation"
    assert training_report.told(recipes.MNIST).startswith("30 epochs, batches of 128, rate 0.01, momentum 0.9")


def test_the_time_left_counts_the_epochs_of_this_call_alone(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = training_report.Clock(10)
    trained = training.Trained(training.Job("one", None, 0), None, [training.Point(7, {}, 1.0)])
    now = 130.0
    assert clock.left(trained) == "0:01:30 left"  # three more, 30 s each
    trained.curve.append(training.Point(10, {}, 1.0))
    assert clock.left(trained) == "done"


@pytest.mark.parametrize("without_rich", [True, False])
def test_a_training_on_a_terminal_draws_bars(capsys, monkeypatch, without_rich):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if without_rich:
        monkeypatch.setattr(training_report.importlib.util, "find_spec", lambda name: None)
    trained = training.Trained(training.Job("one", None, 0), None)
    with training_report.shown(2, enabled=True) as show:
        for epoch in (1, 2):
            trained.curve.append(training.Point(epoch, {"test": 0.5}, 1.25))
            show(trained)
    shown = capsys.readouterr().err
    assert "one" in shown and "loss 1.2500, test 50.00 %, done" in " ".join(shown.split()) and ("━" in shown) != without_rich
    with training_report.shown(2, enabled=False) as show:
        assert show is None


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
