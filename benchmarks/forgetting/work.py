"""Work through a queue of jobs, one file each, with several processes: python -m benchmarks.forgetting.work FOLDER DATA --workers 8

Jobs may be added to FOLDER/queue while it runs; results are lines of FOLDER/results.jsonl. It ends when
FOLDER/closed exists and the queue is empty.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
import traceback
from pathlib import Path

import torch
from torch import multiprocessing

from benchmarks.forgetting import trial


def claim(folder: Path) -> dict | None:
    """The first job that no other worker has; renaming decides."""
    for file in sorted((folder / "queue").glob("*.json")):
        try:
            file.rename(folder / "taken" / file.name)
        except OSError:
            continue
        return json.loads((folder / "taken" / file.name).read_text())
    return None


def write(folder: Path, name: str, text: str) -> None:
    with open(folder / name, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text + "\n")


def work(number: int, room: trial.Room) -> None:
    torch.set_num_threads(1)
    while True:
        job = claim(room.folder)
        if job is None:
            if (room.folder / "closed").exists():
                return
            time.sleep(1)
            continue
        try:
            result = trial.run(job, room)
            if result is not None:
                write(room.folder, "results.jsonl", trial.line(result))
        except Exception:
            write(room.folder, "errors.log", f"{json.dumps(job)}\n{traceback.format_exc()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--epochs", type=int, default=160)
    parser.add_argument("--limit", type=int)
    told = parser.parse_args()
    for part in ("queue", "taken", "networks", "fisher"):
        (told.folder / part).mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room = trial.Room(told.folder, told.data, device, told.network, told.epochs, told.limit)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(number, room)) for number in range(told.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("finished", os.getpid())


if __name__ == "__main__":
    main()
