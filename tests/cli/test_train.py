"""`expunge train`: from end to end, killed, stopped, and what it tells meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from expunge.cli import commands as cli
from expunge.report import training as training_report
from expunge.storage.locks import try_lock
from expunge.vision import recipes
from expunge.vision import zoo as training
from tests.cli.test_commands import CALL
from tests.vision.datasets import files

TRAINED = ["train", "--network", "resnet8", "--batch-size", "128", "--epochs"]


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_folder_of_pictures_of_any_size_is_trained_on(capsys, tmp_path):
    for name, colour in (("cat", (200, 0, 0)), ("dog", (0, 0, 200))):
        folder = tmp_path / "pets" / name
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}.png").write_bytes(files.picture(colour, 9 + number, "PNG"))
        (folder / "._0.png").write_bytes(b"of macOS")
    asked = ["train", "--dataset", str(tmp_path / "pets"), "--network", "resnet8", "--epochs", "1", "--out", str(tmp_path / "out")]
    assert cli.main([*asked, "--quiet"]) == 2
    assert (
        "pictures must be of one size, the first being 9×9; give size= (`expunge train --size`) to resize them" in capsys.readouterr().err
    )
    assert cli.main([*asked, "--size", "8"]) == 0
    assert " 1 epoch, batches of 128" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "pets-resnet8-size8-seed0.json").read_text())["size"] == 8


def test_ctrl_c_says_how_a_training_goes_on(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train_networks", interrupted)
    assert cli.main(["train", "--quiet", "--out", str(tmp_path)]) == 130
    said = f"The state after a whole epoch, mostly the last, is in {tmp_path}/; the same command goes on from there.\nexpunge: stopped\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--network", "nonsense"], "network: must be one of resnet8"),
        (["--dataset", "nonsense"], "dataset: must be one of digits"),
        (["--seeds", "1,x"], "seeds: must be whole numbers with commas between them; found 1,x"),
        (["--seed", "0", "--seeds", "0,1"], "seed: must not be given beside seeds; seeds names all networks; found --seed 0 --seeds 0,1"),
        (["--seed", "3", "--seeds", "3"], "seed: must not be given beside seeds"),
        (["--size", "8"], "size: is for pictures alone"),
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
    with try_lock(tmp_path / "locks" / "digits-resnet8-seed0.lock"):
        assert cli.main([*TRAINED, "1", "--quiet", "--out", str(tmp_path)]) == 2
        rule = "out: must not be in use: another command is at work on it there"
        assert capsys.readouterr().err == f"expunge: {rule}; found {tmp_path}/digits-resnet8-seed0\n"
        assert not list(tmp_path.glob("*.*"))
        assert cli.main([*TRAINED, "1", "--seed", "1", "--quiet", "--out", str(tmp_path)]) == 0
    assert cli.main([*TRAINED, "1", "--quiet", "--out", str(tmp_path)]) == 0


def test_a_recipe_is_told_in_one_line():
    told = training_report.recipe_line(recipes.RECIPES["tiny-imagenet"])
    expected = "160 epochs, batches of 32, rate 0.1, ×0.1 after 80 and 120, rising over the first 20, momentum 0.9, weight decay 0.0001"
    assert told == f"{expected}, no augmentation"
    assert training_report.recipe_line(recipes.MNIST).startswith("30 epochs, batches of 128, rate 0.01, momentum 0.9")


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
