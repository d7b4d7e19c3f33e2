"""`expunge audit --shadows`: from end to end, in pieces, in processes and on a cluster with kills, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import expunge
from expunge.audit import load_audit
from expunge.audit.shadow_measures import METHOD, RULI, ULIRA
from expunge.cli import commands as cli
from expunge.errors import InputError
from expunge.experiments.shadow_work import ShadowWork, prepare
from expunge.requests.task import load_task
from expunge.vision.zoo import build, save_network
from tests import processes
from tests.cli.test_commands import CALL

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import expunge

def points(samples, seed):
    numbers = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 60, generator=numbers), torch.randint(3, (samples,), generator=numbers))

def model():
    return nn.Sequential(nn.Linear(60, 12), nn.ReLU(), nn.Linear(12, 3))

def train():
    return points(100, 1)

def test():
    return points(60, 2)

def recipe():
    return expunge.Tuning(expunge.Constant(0.2, epochs=4), batch_size=25)
"""
METHOD_GIVEN = ("--method", "fisher-mask", "--set", "ratio=0.1", "tuning=None")
QUICK = ("--no-relearn", "--jobs", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A task, and a network that was trained by it."""
    here = tmp_path_factory.mktemp("task")
    (here / "mytask.py").write_text(TASK)
    task = load_task(here / "mytask.py")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = task.fresh()
    expunge.train(model, task.train, task.recipe)
    save_file(model.state_dict(), here / "before.safetensors")
    with torch.no_grad():
        model[2].weight += 0.01
    save_file(model.state_dict(), here / "after.safetensors")
    return here


def arguments(folder, out, *more, shadows="8", method=METHOD_GIVEN):
    networks = ["--before", f"{folder}/before.safetensors", "--after", f"{folder}/after.safetensors"]
    return [
        "audit",
        "--task",
        f"{folder}/mytask.py",
        *networks,
        "--forget",
        "0-23",
        "--out",
        str(out),
        "--shadows",
        shadows,
        *method,
        *more,
    ]


def work_of(folder, out):
    return ShadowWork(
        str(Path(out) / "shadows"), tuple(range(24)), "fisher-mask", ("ratio=0.1", "tuning=None"), 8, str(folder / "mytask.py")
    )


def test_an_audit_with_shadows_from_end_to_end_and_in_pieces(folder, tmp_path, capsys):
    whole = arguments(folder, tmp_path / "whole", *QUICK)
    assert cli.main([*whole, "--dry-run"]) == 0 and not (tmp_path / "whole").exists()
    told = "8 shadows: 8 trainings of 4 epochs of 100 samples, 1 at once, and then 8 forget 24 samples each by FisherMask(ratio=0.1"
    assert told in capsys.readouterr().out
    assert cli.main(whole) == 0
    printed = capsys.readouterr()
    assert told in printed.err and "8 of 8 shadows trained" in printed.err and "8 of 8 shadows forgot" in printed.err
    assert "by 8 shadows, on 24 forgotten and 24 never seen samples" in printed.out
    audit = load_audit(tmp_path / "whole")
    assert audit.shadows.number == 8 and audit.shadows.method.startswith("FisherMask(ratio=0.1") and audit[METHOD].before.low > 0.6
    assert {ULIRA, RULI} <= {measure.name for measure in audit.measures}
    assert "Attacks by shadow networks" in (tmp_path / "whole" / "audit.html").read_text()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole" / "shadows").glob("*.safetensors")}
    assert cli.main([*whole, "--quiet"]) == 0 and "trained" not in capsys.readouterr().err  # nothing is done twice
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    pieces = [*arguments(folder, tmp_path / "pieces", *QUICK), "--seconds", "0.001", "--at-once", "4"]
    codes = [cli.main(pieces)]
    assert "4 of 8 shadows are trained, 0 have forgotten; the same command goes on" in capsys.readouterr().err
    while codes[-1] and len(codes) < 20:
        codes.append(cli.main(pieces))
    assert codes[-1] == 0 and len(codes) > 2
    assert load_audit(tmp_path / "pieces").measures == audit.measures


def test_shadows_choose_by_the_validation_data_of_the_task(folder, tmp_path):
    for name, validation in (("apart.py", "points(40, 3)"), ("shared.py", "test()")):
        (folder / name).write_text(f"{TASK}\ndef validation():\n    return {validation}\n")
    work = replace(work_of(folder, tmp_path), method="choose", given=(), task=str(folder / "apart.py"))
    assert len(prepare(work).ensemble.validation) == 40
    shared = replace(work, task=str(folder / "shared.py"))
    with pytest.raises(
        InputError, match=r"task: validation\(\) of .* must not hold samples of test\(\): shadows choose .*; found 24 equal"
    ):
        prepare(shared)
    assert prepare(replace(shared, method="ssd")).ensemble.validation is None


def test_mistakes_are_one_line_and_write_nothing(folder, tmp_path, capsys):
    (folder / "bare.py").write_text(TASK.partition("def recipe")[0])
    fixed = "    torch.manual_seed(0)\n    network = " + "nn.Sequential(nn.Linear(60, 12), nn.ReLU(), nn.Linear(12, 3))\n"
    before = str(folder / "before.safetensors")
    loaded = f"{fixed}    from safetensors.torch import load_file\n    network.load_state_dict(load_file({before!r}))\n"
    start, _, rest = TASK.partition("    return nn.Sequential")
    (folder / "loaded.py").write_text(start + loaded + "    return network\n" + rest.partition("\n")[2])
    out = tmp_path / "out"
    bare, loaded_task = (
        [str(folder / name) if part.endswith("mytask.py") else part for part in arguments(folder, out)] for name in ("bare.py", "loaded.py")
    )
    cases = [
        (bare, "task: .*bare.py must have recipe()"),
        (loaded_task, "task: model() must make a network with fresh weights, for shadows: it returns those of the original"),
        (arguments(folder, out, shadows="7"), "shadows: must be even: two shadows share the candidates out; found 7"),
        (arguments(folder, out, shadows="6"), "shadows: must be 8 or more (policy.shadows), fewer have no interval; found 6"),
        (arguments(folder, out, shadows="-2"), "shadows: must be a whole number of at least 4"),
        (arguments(folder, out, shadows="0"), "method: is for shadows: give their number"),
        (arguments(folder, out, method=()), "method: must be how the audited network was made to forget"),
        (arguments(folder, out, method=("--method", "nonsense")), "method: must be choose, one of"),
        (arguments(folder, out, method=("--method", "ssd", "--set", "x=1")), "set: must be settings of ssd"),
        (arguments(folder, out, method=("--request", str(folder))), "request: must be a folder that `expunge unlearn` made"),
        (arguments(folder, out, "--seconds", "-1"), "seconds: "),
        (arguments(folder, out, "--at-once", "-1"), "at_once: "),
        (arguments(folder, out, "--jobs", "0"), "jobs: must be a whole number of at least 1; found 0"),
        (arguments(folder, out, "--jobs", "3", "--on", "ray"), "jobs: are processes of this machine; leave it out with --on ray"),
        ([*arguments(folder, out), "--forget", "90-120"], "forget: ids must be rows of the training data, 0 to 99"),
    ]
    for asked, words in cases:
        code, error = cli.main(asked), capsys.readouterr().err
        first, _, last = words.partition(".*")
        assert code == 2 and error.startswith(f"expunge: {first}") and last in error and error.count("\n") == 1, error
    assert not out.exists()


def test_a_folder_of_another_audit_is_named_and_left_alone(folder, tmp_path, capsys):
    shared = ("--shadow-folder", str(tmp_path / "shared"), *QUICK, "--seconds", "0.001", "--quiet")
    assert cli.main(arguments(folder, tmp_path / "one", *shared)) == 1
    kept = sorted(os.listdir(tmp_path / "shared"))
    capsys.readouterr()
    assert cli.main([*arguments(folder, tmp_path / "two", *shared), "--forget", "0-29"]) == 2
    error = capsys.readouterr().err
    assert "shared holds shadows of another audit: data, candidates differ; choose another folder for these, or remove it" in error
    assert sorted(os.listdir(tmp_path / "shared")) == kept and not (tmp_path / "two").exists()
    other = ("--method", "ssd")  # the same trained shadows serve another method
    assert cli.main(arguments(folder, tmp_path / "three", *shared, method=other)) == 1
    assert "2 of 8 shadows are trained" in capsys.readouterr().err


def test_the_method_of_a_request_need_not_be_repeated(folder, tmp_path, capsys):
    requests = tmp_path / "requests"
    asked = ["unlearn", "--task", f"{folder}/mytask.py", "--weights", f"{folder}/before.safetensors", "--forget", "0-23", "--no-audit"]
    assert cli.main([*asked, "--out", str(requests), *METHOD_GIVEN, "--quiet"]) == 0
    call = arguments(folder, tmp_path / "out", "--dry-run", method=("--request", str(requests)))
    assert cli.main(call) == 0
    assert "forget 24 samples each by FisherMask(ratio=0.1" in capsys.readouterr().out
    assert cli.main([*call, "--method", "ssd"]) == 2 and "method: must be that of the request" in capsys.readouterr().err
    assert cli.main([*call, "--forget", "0-29"]) == 2
    assert "forget: must be the 24 samples that were forgotten in" in capsys.readouterr().err


def test_shadows_of_a_built_in_dataset_are_trained_as_the_network_was(tmp_path, capsys):
    save_network(tmp_path / "net.safetensors", build("resnet8", 10, 1, 0, torch.device("cpu")), "resnet8", 10, 1)
    (tmp_path / "net.json").write_text(json.dumps({"recipe": {"epochs": 3, "rate": 0.05, "decays": [0.5]}, "precision": "float32"}))
    networks = ["--before", f"{tmp_path}/net.safetensors", "--after", f"{tmp_path}/net.safetensors"]
    assert (
        cli.main(
            ["audit", *networks, "--forget", "label=3", "--out", str(tmp_path / "out"), "--shadows", "64", "--method", "ssd", "--dry-run"]
        )
        == 0
    )
    # 137 samples of the class and 46 of the test set: half of them beside the 1,210 others
    assert "64 shadows: 64 trainings of 3 epochs of 1,301 samples" in capsys.readouterr().out
    made = prepare(ShadowWork(str(tmp_path / "shadows"), (5, 6, 7), "ssd", before=f"{tmp_path}/net.safetensors", number=8))
    assert made.ensemble.tuning.schedule.epochs == 3 and len(made.ensemble.rows) == 6
    seeds = [made.ensemble._fresh(number).state_dict() for number in (0, 0, 1)]
    same = [all(torch.equal(value, other[name]) for name, value in seeds[0].items()) for other in seeds[1:]]
    assert same == [True, False]


@pytest.mark.slow
def test_processes_share_the_shadows_and_one_that_is_killed_loses_nothing(folder, tmp_path):
    asked = arguments(folder, tmp_path / "out", "--no-relearn", "--jobs", "2")
    child = subprocess.Popen(
        [sys.executable, "-c", CALL, *asked], env=processes.environment(), stdout=subprocess.DEVNULL, start_new_session=True
    )
    shadows = tmp_path / "out" / "shadows"
    while child.poll() is None and len([*shadows.glob("*.trained.safetensors")]) < 2:
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)  # all of them, at once
    child.wait()
    kept = {path: path.stat().st_mtime_ns for path in shadows.glob("*.trained.safetensors")}
    assert kept and not (tmp_path / "out" / "result.json").exists()
    assert cli.main(asked) == 0 and all(path.stat().st_mtime_ns == then for path, then in kept.items())
    assert cli.main(arguments(folder, tmp_path / "alone", *QUICK)) == 0
    assert load_audit(tmp_path / "out").measures == load_audit(tmp_path / "alone").measures


SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from expunge.cli import commands as cli

memory = {"object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
nodes = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)


def kill():
    while not any(Path(sys.argv[1]).glob("*.trained.safetensors")):
        time.sleep(0.005)
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("a node is dead", flush=True)


killer = threading.Thread(target=kill)
killer.start()
code = cli.main(sys.argv[2:])
killer.join()
print("code", code, "nodes", len(nodes), flush=True)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_shadows_of_a_node_that_dies_are_done_by_another(folder, tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "script.py").write_text(SCRIPT)
    asked = arguments(folder, tmp_path / "out", "--no-relearn", "--on", "ray")
    command = [sys.executable, "script.py", str(tmp_path / "out" / "shadows"), *asked]
    finished = subprocess.run(command, cwd=tmp_path, env=processes.environment(), capture_output=True, text=True, timeout=240)
    assert "a node is dead" in finished.stdout and "code 0 nodes 1" in finished.stdout, finished.stdout + finished.stderr
    assert cli.main(arguments(folder, tmp_path / "alone", *QUICK)) == 0
    assert load_audit(tmp_path / "out").measures == load_audit(tmp_path / "alone").measures


def test_without_ray_its_extra_is_named(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(arguments(folder, tmp_path / "out", "--on", "ray", "--quiet")) == 2
    assert "on: 'ray' must be installed: pip install 'expunge[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
