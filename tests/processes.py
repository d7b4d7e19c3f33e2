"""Start real processes that form one group of torch.distributed, as torchrun does, and wait for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import expunge

ROOT = Path(__file__).parents[1]
AFTER_FAILURE = 5.0  # seconds that the others have to end when one has failed
# Without it gloo's threads may outlive Python, and the process then aborts after its work is done: about one run in forty here.
# And a signal prints the stacks of all threads, for `printed`.
PARTING = """import atexit, faulthandler, signal, torch.distributed
faulthandler.register(signal.SIGUSR1)
atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
"""


def environment(**more: str) -> dict[str, str]:
    """The processes find the package where this one found it, installed or not."""
    path = os.pathsep.join([str(Path(expunge.__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def groups(folder: str | Path, *sizes: int) -> Iterator[int]:
    """In a process that was started: a group of each size, one after the other, of the first ranks; the others wait for the next one.

    A start of Python and torch takes seconds: so several sizes have one.
    """
    import torch.distributed as distributed

    rank = int(os.environ["RANK"])
    for number, size in enumerate(sizes):
        if rank < size:
            meeting = f"file://{Path(folder).resolve()}/meeting-{number}"
            distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
            yield size
            distributed.barrier()
            distributed.destroy_process_group()


def start(script: str, folder: Path, size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process per rank, each running the script in the folder; `init_process_group("gloo")` there makes them one group."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    (folder / "script.py").write_text(PARTING + script)
    return [
        subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=folder,
            env=environment(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def printed(processes: list[subprocess.Popen[str]], seconds: float = 120, may_fail: bool = False) -> list[str]:
    """What each process prints; none may take longer, and none may fail unless that is said.

    Where one fails the others have a few seconds more: they may wait for it longer than the test may take. What still runs then prints the
    stacks of its threads, and the error has what all of them printed.
    """
    with ThreadPoolExecutor(len(processes)) as readers:
        reading = [readers.submit(process.communicate) for process in processes]
        try:
            end = time.monotonic() + seconds
            while (late := wait(reading, 0.1).not_done) and time.monotonic() < end:
                if not may_fail and any(process.poll() for process in processes):
                    end = min(end, time.monotonic() + AFTER_FAILURE)
            if late:
                _show_stacks(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
    outputs = [output.result()[0] for output in reading]
    everything = "\n".join(f"rank {rank} ({process.returncode}):\n{outputs[rank]}" for rank, process in enumerate(processes))
    assert not late, f"{len(late)} of {len(processes)} processes did not end:\n{everything}"
    assert may_fail or not any(process.returncode for process in processes), everything
    return outputs


def _show_stacks(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(1)  # for them to print
