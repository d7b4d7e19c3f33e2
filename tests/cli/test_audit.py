"""`expunge audit`: from end to end, what it refuses, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from expunge.audit import load_audit
from expunge.cli import commands as cli
from expunge.vision.zoo import build, save_network
from tests.cli.test_commands import CALL


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Of fresh weights: what the command does with files does not depend on what networks know."""
    folder = tmp_path_factory.mktemp("networks")
    for seed in range(2):
        save_network(folder / f"{seed}.safetensors", build("resnet8", 10, 1, seed, torch.device("cpu")), "resnet8", 10, 1)
    return folder


def arguments(networks, out, *more):
    return ["audit", "--before", f"{networks}/0.safetensors", "--after", f"{networks}/1.safetensors", "--out", str(out), *more]


def test_an_audit_from_end_to_end(networks, tmp_path, capsys):
    asked = arguments(networks, tmp_path / "out", "--forget", "label=3", "--no-relearn", "--done", "New weights.", "--quiet")
    assert cli.main(asked) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("expunge: before: does not know the forgotten class") and printed.err.count("\n") == 1
    assert "audit: class 3 (137 samples), no retrained network" in printed.out
    audit = load_audit(tmp_path / "out")
    assert audit.verdict.sentence.split()[0] in printed.out and audit.done == "New weights." and audit.sizes["test"] == 450
    assert "New weights." in (tmp_path / "out" / "audit.html").read_text()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["files"] == ["audit.html", "model-card.md", "result.json"]
    assert cli.main(asked) == 0 and load_audit(tmp_path / "out") == audit  # over its own result


def test_mistakes_are_one_line_and_write_nothing(networks, tmp_path, capsys):
    out = tmp_path / "out"
    rows = tmp_path / "rows.txt"
    rows.write_text("1 2 three")
    cases = [
        (["--forget", "label=13"], "forget: must occur in the dataset; found 13"),
        (["--forget", "nonsense"], "forget: must be label=NUMBER"),
        (["--forget", f"rows={rows}"], "forget: must be whole numbers"),
        (["--forget", "label=3", "--retrained", str(rows)], "retrained: must be a whole safetensors file"),
        (["--forget", "label=3", "--policy", str(rows)], "policy: must be a file of JSON"),
        (["--forget", "label=3", "--dataset", "nothing"], "dataset: must be one of"),
    ]
    for more, words in cases:
        assert cli.main(arguments(networks, out, *more)) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"expunge: {words}") and error.count("\n") == 1, error
    few = tmp_path / "few.txt"
    few.write_text("1 2 3")
    save_file({"weight": torch.zeros(3)}, tmp_path / "mine.safetensors")
    assert cli.main(arguments(networks, out, "--forget", f"rows={few}", "--quiet")) == 2  # after the first reading
    assert capsys.readouterr().err.startswith("expunge: forget: must hold 20 samples or more")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "mine.pt")
    for name in ("mine.safetensors", "mine.pt"):
        assert cli.main(["audit", "--before", f"{tmp_path}/{name}", "--after", "absent", "--forget", "label=3", "--out", str(out)]) == 2
        told = "before: must be a file of `expunge train` or `save_network`; for weights of a model of your own give --task"
        assert told in capsys.readouterr().err
    assert cli.main(["audit", "--before", "absent", "--after", "absent", "--forget", "label=3", "--out", str(out)]) == 1
    assert not out.exists()
    (tmp_path / "model-card.md").write_text("mine")
    assert cli.main(arguments(networks, tmp_path, "--forget", "label=3")) == 2
    assert (tmp_path / "model-card.md").read_text() == "mine"


@pytest.mark.slow
def test_an_audit_that_was_killed_goes_on(networks, tmp_path, capsys):
    asked = arguments(networks, tmp_path / "out", "--forget", "label=3", "--quiet")
    child = subprocess.Popen([sys.executable, "-c", CALL, *asked], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    parts = tmp_path / "out" / "parts"
    while child.poll() is None and (not parts.exists() or len([*parts.glob("*.json")]) < 3):
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL and not (tmp_path / "out" / "result.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert cli.main(asked) == 0
    assert len([*parts.glob("*.json")]) > len(kept) and all(path.stat().st_mtime_ns == then for path, then in kept.items())
    whole = [*asked]
    whole[whole.index("--out") + 1] = str(tmp_path / "whole")
    assert cli.main(whole) == 0
    assert load_audit(tmp_path / "out") == load_audit(tmp_path / "whole")
