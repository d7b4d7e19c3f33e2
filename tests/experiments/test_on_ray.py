"""Cells on a real Ray cluster of two nodes, one of which dies: every cell has the result that one process gives."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from expunge.errors import InputError
from expunge.experiments.on_ray import _do, _first_to_need, run_on_ray
from expunge.experiments.runner import run
from expunge.experiments.worker import Work
from tests import processes
from tests.experiments.tiny import place, tasks

SCRIPT = """
import sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from expunge.experiments.worker import Work, run_work
from tests.experiments.tiny import place, tasks

here, asked = place(Path(sys.argv[1])), tasks("table1", ("finetune", "fisher-mask"))
memory = {"object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
nodes = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)
lines = []


def say(line):
    lines.append(line)
    print(line, flush=True)
    if " finetune " in line or " fisher-mask" in line:
        if len(nodes) == 2:  # the first cell of the second wave is done, and both nodes have one in hand
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            print("a node is dead", flush=True)


broken = run_work(Work(tuple(asked), str(here.folder), str(here.models), device="cpu", on="ray"), say)
print("broken", broken, "done", all(here.done(task.cell) for task in asked), "nodes", len(nodes), flush=True)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_cells_of_a_node_that_dies_are_done_by_another(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(tmp_path / "cluster")]
    finished = subprocess.run(command, cwd=tmp_path, env=processes.environment(), capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0 and "broken 0 done True nodes 1" in finished.stdout, finished.stdout + finished.stderr
    asked, there, alone = tasks("table1", ("finetune", "fisher-mask")), place(tmp_path / "cluster"), place(tmp_path / "alone")
    assert run(asked, alone) == 0
    for task in asked:
        ours, theirs = there.result(task.cell), alone.result(task.cell)
        assert ours is not None and theirs is not None
        assert (ours.weights, ours.before, ours.retrained) == (theirs.weights, theirs.before, theirs.retrained)
        assert [(step.epoch, step.remain, step.forget) for step in ours.history] == [
            (step.epoch, step.remain, step.forget) for step in theirs.history
        ]


def test_without_ray_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    here = place(tmp_path)
    with pytest.raises(InputError, match=r"on: 'ray' must be installed: pip install 'expunge\[ray\]'"):
        run_on_ray(Work((), str(here.folder), str(here.models), on="ray"), lambda line: None)
    assert not here.folder.exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "host.invalid:6379"])
def test_a_cluster_that_is_not_there_is_one_error_and_soon(tmp_path, monkeypatch, address):
    """Ray itself tries for many minutes to reach the first."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    here, began = place(tmp_path), time.monotonic()
    with pytest.raises(InputError, match=rf"on: a cluster must be at RAY_ADDRESS \(host:6379\), .*; found RAY_ADDRESS={address}"):
        run_on_ray(Work((), str(here.folder), str(here.models), device="cpu", on="ray"), lambda line: None)
    assert time.monotonic() - began < 60 and not here.folder.exists()


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path):
    with pytest.raises(InputError, match="out: must be a folder that every node of the cluster sees"):
        _do(str(tmp_path / "elsewhere" / "asked" / "cells.json"), 0)


def test_those_that_train_come_first(tmp_path):
    """All cells share the trained network, and the retrained one: the first cell that needs each of them trains it."""
    asked, here = tasks("table1"), place(tmp_path)
    first = _first_to_need(asked, here)
    known = {spec.digest for number in first for spec in here.store.needed(asked[number].cell)}
    assert 1 <= len(first) < len(asked)
    assert known == {spec.digest for task in asked for spec in here.store.needed(task.cell)}
