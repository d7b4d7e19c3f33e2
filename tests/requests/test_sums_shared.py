"""`expunge fisher build` by several real processes: the same bytes at 1 to 4, after kills; one line everywhere where it cannot be done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from expunge.cli import main
from expunge.requests.sums_store import opened
from tests import disks, processes
from tests.requests.small import TASK, write_task, write_weights

SLOW = """
import os, time

class Slow(torch.utils.data.Dataset):
    def __init__(self, data):
        self.tensors, self.targets = data.tensors, data.tensors[1]

    def __len__(self):
        return len(self.tensors[0])

    def batch_of(self, rows):
        if len(rows) == 3:  # for sums, and not for a plan, labels or a digest
            with open("read.txt", "a") as file:
                file.write("\\\\n".join(map(str, rows.tolist())) + "\\\\n")
            time.sleep(float(os.environ.get("PAUSE", "0")))
        return tuple(column[rows] for column in self.tensors)

def train():
    return Slow(points(792, 1))
"""
GIVEN = ("fisher", "build", "--task", "mytask.py", "--weights", "model.safetensors", "--batch-size", "3", "--quiet", "--out")
BUILD = f"import os, sys\nfrom expunge.cli import main\nsys.exit(main([*{GIVEN!r}, *sys.argv[1:]]))"  # 96 samples per chunk, 12 chunks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a task of 792 samples that tells which it reads, its weights, and a store built by one process."""
    write_weights(tmp_path)
    write_task(tmp_path, TASK + SLOW.replace("\\\\n", "\\n"))
    monkeypatch.chdir(tmp_path)
    assert main([*GIVEN, "one"]) == 0
    (tmp_path / "read.txt").unlink()
    return tmp_path


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir()) if path.name != ".lock"}


def rows_read(folder: Path) -> list[int]:
    """The rows of all batches that were read for sums."""
    file = folder / "read.txt"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def killed(started: list[subprocess.Popen[str]], ranks: range, store: Path, chunks: int) -> None:
    """Kill these ranks as soon as so many chunks are finished and each rank has claimed one."""
    end = time.monotonic() + 90
    while len(list(store.glob("pass-*/chunk-*"))) < chunks or not all(holds(store, started[rank].pid) for rank in ranks):
        assert time.monotonic() < end and all(process.poll() is None for process in started), [process.poll() for process in started]
        time.sleep(0.005)
    for rank in ranks:
        started[rank].send_signal(signal.SIGKILL)


def holds(store: Path, process: int) -> bool:
    return any(f"(process {process} " in text(path) for path in store.glob("pass-*/claim-*"))


def samples(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["count"])


def text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


SAME = f"""
import shutil
from expunge.cli import main
from tests import processes

for size in processes.groups(".", 2, 3, 4):
    assert main([*{GIVEN!r}, f"many-{{size}}"]) == 0
"""


@pytest.mark.slow
def test_the_same_store_at_any_number_of_processes(folder):
    processes.printed(processes.start(SAME, folder, 4))
    for size in (2, 3, 4):
        assert contents(folder / f"many-{size}") == contents(folder / "one")
    assert sorted(rows_read(folder)) == sorted(3 * list(range(792)))  # every sample by one of them, once
    with opened(folder / "many-3") as store:
        assert store.sums("total").count == 792


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0])  # the harder: it has the lock of the store, would write it, and serves the meeting place
def test_the_others_do_what_a_killed_process_would_have(folder, monkeypatch, victim):
    monkeypatch.setenv("PAUSE", "0.02")
    started = processes.start(BUILD, folder, 3, "many")
    killed(started, range(victim, victim + 1), folder / "many", 2)
    outputs = processes.printed(started, may_fail=True)
    assert [process.returncode for process in started] == [-9 if rank == victim else 0 for rank in range(3)], outputs
    with opened(folder / "many") as store:  # which removes what nobody could, since one of them never left
        assert store.header.complete
    assert contents(folder / "many") == contents(folder / "one")


@pytest.mark.slow
def test_a_pass_that_was_stopped_goes_on_with_any_number_of_processes(folder, monkeypatch):
    store = folder / "many"
    monkeypatch.setenv("PAUSE", "0.02")
    started = processes.start(BUILD, folder, 3, "many")
    killed(started, range(3), store, 5)
    processes.printed(started, may_fail=True)
    assert [process.returncode for process in started] == [-9] * 3
    done = sum(samples(path) for path in store.glob("pass-*/chunk-*"))
    (folder / "read.txt").unlink()
    monkeypatch.setenv("PAUSE", "0")
    assert main([*GIVEN, "many"]) == 0
    assert contents(store) == contents(folder / "one")
    again = rows_read(folder)
    assert len(again) == len({*again}) == 792 - done and done >= 5 * 4  # what was finished was not read again


@pytest.mark.slow
def test_torchrun_replaces_a_process_that_dies(folder):
    dying = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1': DIES = True\n"
    task = (folder / "mytask.py").read_text()
    ends = '        if "DIES" in globals() and len(rows) == 3 and 300 in rows.tolist():\n            os.kill(os.getpid(), 9)\n'
    (folder / "dying.py").write_text(task.replace("    def batch_of(self, rows):\n", f"    def batch_of(self, rows):\n{ends}") + dying)
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    given = [part.replace("mytask.py", "dying.py") for part in GIVEN]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "expunge", *given, "many"]
    own_store = processes.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", PAUSE="0.02")
    finished = subprocess.run(command, cwd=folder, env=own_store, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "many: 4 of 4 groups, 792 samples, complete\n"  # said once
    assert contents(folder / "many") == contents(folder / "one")


BAD = """
import os, sys, time
import torch.distributed as distributed
from pathlib import Path
from expunge.cli import main

distributed.init_process_group("gloo")
rank = distributed.get_rank()
given = ["fisher", "build", "--weights", "model.safetensors", "--quiet", "--patience", "20", "--batch-size"]
cases = {
    "batch size": ["8" if rank else "16", "--task", "mytask.py", "--out", "bad"],
    "out": ["16", "--task", "mytask.py", "--out", f"bad-{rank}"],
    "task": ["16", "--task", "other.py" if rank else "mytask.py", "--out", "bad"],
    "raising": ["16", "--task", "raising.py", "--out", "bad"],
    "in use": ["16", "--task", "mytask.py", "--out", "one"],
}
for name, case in cases.items():
    print(f"case {name}", flush=True)
    began = time.monotonic()
    print(main([*given, *case]), time.monotonic() - began < 15, flush=True)
print("case missing", flush=True)
if not rank:
    print(main([*given[:-2], "1", "--batch-size", "16", "--task", "mytask.py", "--out", "bad"]), flush=True)
"""


@pytest.mark.slow
def test_what_cannot_be_done_is_one_line_on_every_process(folder):
    (folder / "other.py").write_text((folder / "mytask.py").read_text() + "\n")
    raising = 'if os.environ["RANK"] == "1":\n    def test():\n        pass\n    def train():\n        raise ValueError("no disk")\n'
    (folder / "raising.py").write_text((folder / "mytask.py").read_text() + raising)
    before = contents(folder / "one")
    with opened(folder / "one"):
        outputs = processes.printed(processes.start(BAD, folder, 2))
    cases = [dict(part.split("\n", 1) for part in output.split("case ")[1:]) for output in outputs]
    for name, told in {
        "batch size": "all processes must have the same number of samples or settings; found",
        "out": "all processes must have the same folder `out`; found",
        "task": "all processes must have the same task file; found",
    }.items():
        assert all(told in own[name] and own[name].endswith(" True\n") for own in cases), cases
    assert "rank 1 failed: InputError: task: train() of raising.py must not raise; found ValueError: no disk" in cases[0]["raising"]
    assert "task: train() of raising.py must not raise; found ValueError: no disk" in cases[1]["raising"]
    assert "out: must not be in use: another command works with this store" in cases[0]["in use"]
    assert "rank 0 failed: InputError: out: must not be in use" in cases[1]["in use"]
    assert "rank 1 of 2 processes did not come within 1 seconds" in cases[0]["missing"]
    assert contents(folder / "one") == before and not [name for name in os.listdir(folder) if name.startswith("bad")]


@pytest.mark.slow
def test_a_full_disk_is_told_by_every_process_and_the_same_command_goes_on(folder):
    with disks.small_disk(folder, 256 * 1024) as disk:
        (disk / "filler").write_bytes(bytes(224 * 1024))
        started = processes.start(BUILD, folder, 2, "disk/many")
        outputs = processes.printed(started, may_fail=True)
        assert [process.returncode for process in started] == [1, 1], outputs
        assert all("No space left on device" in output and len(output.splitlines()) == 1 for output in outputs), outputs
        (disk / "filler").unlink()
        assert main([*GIVEN, "disk/many"]) == 0
        assert contents(disk / "many") == contents(folder / "one")
