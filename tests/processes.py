"""Start real processes that form one group of torch.distributed, as torchrun does, and wait for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import expunge

ROOT = Path(__file__).parents[1]
# Without it gloo's threads may outlive Python, and the process then aborts after its work is done: about one run in forty here.
PARTING = """import atexit, torch.distributed
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
    """What each process prints; none may take longer, and none may fail unless that is said."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()  # a later test would be told of it
    assert may_fail or not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs
