"""Sums by chunks in several real processes: the same bits at 1 to 4, after kills, and a clear error everywhere where they do not agree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from expunge import fisher, metrics
from expunge.fisher import FisherSums
from tests import processes
from tests.fisher import sharing

SAME = """
import torch.distributed as distributed
from expunge import fisher, metrics
from tests import processes
from tests.fisher import sharing

model, data = sharing.case()
for size in processes.groups(".", 2, 3, 4):
    place = f"{size}-{distributed.get_rank()}.safetensors"
    for kind in sharing.KINDS:
        fisher.by_chunks(model, data, kind=kind, **sharing.CUT).save(f"{kind}-{place}")
    for name, sums in fisher.by_group(model, data, data.tensors[1], keep=f"groups-{size}", **sharing.CUT).items():
        sums.save(f"group-{name}-{place}")
    fisher.by_chunks(model, sharing.Stream(data), **sharing.CUT).save(f"stream-{place}")
    print(metrics.by_chunks(model, data, **sharing.CUT))
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, FisherSums]:
    model, data = sharing.case()
    sums = {kind: fisher.by_chunks(model, data, kind=kind, **sharing.CUT) for kind in sharing.KINDS}
    groups = fisher.by_group(model, data, data.tensors[1], **sharing.CUT)
    sums["stream"] = sums["empirical"]
    return sums | {f"group-{name}": part for name, part in groups.items()}


def assert_same_bits(first: FisherSums, second: FisherSums) -> None:
    assert first.count == second.count and first.digest == second.digest
    assert all(torch.equal(first.sums[name], second.sums[name]) for name in second.sums)


@pytest.mark.slow
def test_the_same_bits_at_any_number_of_processes(tmp_path, alone):
    model, data = sharing.case()
    outputs = processes.printed(processes.start(SAME, tmp_path, 4))
    for name, sums in alone.items():
        for size in (2, 3, 4):
            for rank in range(size):
                assert_same_bits(FisherSums.load(tmp_path / f"{name}-{size}-{rank}.safetensors"), sums)
    measured = metrics.by_chunks(model, data, **sharing.CUT)
    assert outputs == [f"{measured}\n" * times for times in (3, 3, 2, 1)]
    assert measured.accuracy == metrics.accuracy(model, data)
    assert measured.mean_loss == pytest.approx(metrics.mean_loss(metrics.logits(model, data)), rel=1e-6)


KILLED = """
import sys, time
import torch.distributed as distributed
from expunge import fisher
from tests.fisher import sharing

distributed.init_process_group("gloo")
model, data = sharing.case()
slow = sharing.Slow(data, ends=False)
print("reading", flush=True)
fisher.by_chunks(model, slow, keep="pass", **sharing.CUT).save(f"sums-{distributed.get_rank()}.safetensors")
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0])  # the harder: it serves the store
def test_the_others_do_the_chunks_of_a_process_that_is_killed(tmp_path, alone, victim):
    started = processes.start(KILLED, tmp_path, 2)
    holds = f"(process {started[victim].pid} "
    end = time.monotonic() + 60
    while not any(holds in text(path) for path in (tmp_path / "pass").glob("claim-*")):
        assert time.monotonic() < end and started[victim].poll() is None
        time.sleep(0.01)
    started[victim].send_signal(signal.SIGKILL)
    processes.printed(started, may_fail=True)
    assert [process.returncode for process in started][1 - victim] == 0
    assert_same_bits(FisherSums.load(tmp_path / f"sums-{1 - victim}.safetensors"), alone["empirical"])
    assert not (tmp_path / f"sums-{victim}.safetensors").exists() and not list((tmp_path / "pass").glob("c*-*"))


def text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


RESTARTED = """
import os
import torch.distributed as distributed
from expunge import fisher
from tests.fisher import sharing

distributed.init_process_group("gloo")
model, data = sharing.case()
first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", distributed.get_rank()
slow = sharing.Slow(data, ends=first and rank == 1)
fisher.by_chunks(model, slow, keep="pass", **sharing.CUT).save(f"sums-{rank}.safetensors")
open(f"read-{rank}", "w").write(str(slow.read))
"""


@pytest.mark.slow
def test_torchrun_replaces_a_process_that_dies(tmp_path, alone):
    (tmp_path / "script.py").write_text(processes.PARTING + RESTARTED)
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "script.py"]
    own_store = processes.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # pytorch#135712: a shared one has stale addresses
    finished = subprocess.run(command, cwd=tmp_path, env=own_store, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    for rank in (0, 1):
        assert_same_bits(FisherSums.load(tmp_path / f"sums-{rank}.safetensors"), alone["empirical"])
    again = sum(int((tmp_path / f"read-{rank}").read_text()) for rank in (0, 1))
    assert again < alone["empirical"].count  # what was finished before was not read again


BAD = """
import os, sys, tempfile, time
import torch
import torch.distributed as distributed
from torch.utils.data import TensorDataset
from expunge import fisher
from tests.fisher import sharing

distributed.init_process_group("gloo")
rank = distributed.get_rank()
fisher.by_chunks(sharing.case()[0], sharing.case()[1], keep="another", **sharing.CUT, kind="batch")
tasks = ["data", "order", "data type", "batch size", "weights", "weights' type", "kind", "seed", "keep", "another", "forbidden", "failing"]
for task in (*tasks, "temporary", "stream", "raising", "hanging", "missing"):
    model, data = sharing.case()
    settings, patience = dict(sharing.CUT), 60.0
    if rank == 1 and task == "order":
        data = TensorDataset(*(column.flip(0) for column in data.tensors))
    if rank == 1 and task == "data type":
        data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    if rank == 1 and task == "batch size":
        settings["batch_size"] = 8
    if rank == 1 and task == "weights' type":
        model.double()
    if task == "seed":
        settings |= {"kind": "sampled", "seed": rank}
    if task == "another":
        settings["keep"] = "another"
    access, temporary = os.access, tempfile.mkdtemp
    if task == "temporary":
        tempfile.mkdtemp = lambda **_: os.mkdir("/dev/null/none")
    if task == "forbidden":
        settings["keep"], os.access = "forbidden", (lambda *_: False) if rank == 1 else os.access
    if task == "stream":
        data, settings["keep"] = sharing.Shifting(data, rank, pause=0.15), "stream"
    if task == "raising":
        data, settings["keep"] = sharing.Failing(data, rank == 1), "raising"
    if rank == 1 and task == "data":
        data.tensors[0][3] += 1
    if rank == 1 and task == "weights":
        model[0].bias.data += 1
    if rank == 1 and task == "kind":
        settings["kind"] = "expected"
    if task == "keep":
        settings["keep"] = f"pass-{rank}"
    if task == "failing" and rank == 1:
        settings["parameters"] = ["other"]
    if task == "missing":
        patience = 1.0
        if rank == 1:
            break
    if task == "hanging":
        patience, settings["keep"] = 1.0, "hanging"
        distributed.barrier()
        if rank == 1:
            data = sharing.Slow(data, ends=False, pause=5)
    started = time.monotonic()
    try:
        fisher.by_chunks(model, data, patience=patience, **settings)
        print(f"{task}: no error", flush=True)
    except Exception as error:
        print(f"{task}: {type(error).__name__}: {error} [{time.monotonic() - started < 20}]", flush=True)
    os.access, tempfile.mkdtemp = access, temporary
"""


@pytest.mark.slow
def test_processes_that_do_not_agree_get_an_error_everywhere_and_soon(tmp_path):
    outputs = [output.splitlines() for output in processes.printed(processes.start(BAD, tmp_path, 2))]
    other_data = "MismatchError: all processes must have the same data (values, order or groups); found fingerprint"
    expected = {
        "order": (other_data, "on rank 1 [True]"),
        "data type": (other_data, "on rank 1 [True]"),
        "batch size": (
            "MismatchError: all processes must have the same number of samples or batch size; found",
            "523 samples, batches of 16, 2 per chunk on rank 0 and 523 samples, batches of 8, 2 per chunk on rank 1 [True]",
        ),
        "weights' type": ("MismatchError: all processes must have the same weights; found fingerprint", "on rank 1 [True]"),
        "seed": ("MismatchError: all processes must have the same seed; found 0 on rank 0 and 1 on rank 1 [True]",),
        "another": ("MismatchError: keep: another belongs to a pass with another kind: batch there and empirical here [True]",),
        "stream": ("MismatchError: data: chunk ", "stream held other samples than one of its processes has read", "[True]"),
        "data": (other_data, "on rank 0 and", "on rank 1 [True]"),
        "weights": ("MismatchError: all processes must have the same weights; found", "on rank 0 and", "on rank 1 [True]"),
        "kind": ("MismatchError: all processes must have the same kind; found empirical on rank 0 and expected on rank 1 [True]",),
        "keep": ("MismatchError: all processes must have the same folder `keep`", "pass-0 on rank 0", "pass-1 on rank 1 [True]"),
    }
    for lines in outputs:
        by_task = dict(line.split(": ", 1) for line in lines)
        for task, parts in expected.items():
            assert all(part in by_task[task] for part in parts), f"{task}: {by_task[task]}"
    tasks = [dict(line.split(": ", 1) for line in lines) for lines in outputs]
    assert "rank 1 failed: InputError: parameters" in tasks[0]["failing"] and tasks[1]["failing"].startswith("InputError: parameters")
    assert "rank 1 failed: InputError: keep: must be a folder that is writable" in tasks[0]["forbidden"]
    assert tasks[1]["forbidden"].startswith("InputError: keep: must be a folder that is writable")
    assert tasks[0]["temporary"].startswith("NotADirectoryError") and tasks[0]["temporary"].endswith("[True]")
    assert tasks[1]["temporary"].startswith("MissingProcessError: rank 0 failed: NotADirectoryError")
    assert tasks[0]["raising"] == "no error" and tasks[1]["raising"].startswith("OSError: the disk of rank 1")  # the other did its chunks
    assert tasks[0]["missing"] == "MissingProcessError: rank 1 of 2 processes did not come within 1 seconds [True]"
    told = r"MissingProcessError: no chunk was finished within \d+ seconds: chunk .* by rank 1 \(process .*patience"
    assert re.match(told, tasks[0]["hanging"])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("pass", "forbidden"))]
    assert os.listdir(tmp_path / "hanging")
