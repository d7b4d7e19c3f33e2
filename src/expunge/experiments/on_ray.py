"""Run a list of cells as tasks of a Ray cluster; results go into the same folder as ever, which all nodes must see.

A task trains a network or runs a cell. Ray starts it again elsewhere when its process or its node dies. Nothing is lost with it: files
are written whole or not at all, and locks end with their process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from expunge.errors import InputError
from expunge.experiments.cells import digest_of
from expunge.experiments.cluster import cluster
from expunge.experiments.runner import Place, Task, missing_networks, run
from expunge.experiments.worker import Work, read_work
from expunge.storage.codec import encode
from expunge.storage.files import write_json


def run_on_ray(work: Work, say: Callable[[str], None], starting: Callable[[str], None] | None = None) -> int:
    """Do what is not done; return the number of tasks that broke. The cluster: RAY_ADDRESS, that of this machine, or a new one here."""
    place = _absolute(work).place
    with cluster(place.device.type) as run_all:
        path = _written(_absolute(work))
        open_tasks = [number for number, asked in enumerate(work.tasks) if not place.done(asked.cell)]
        needing = _first_to_need([work.tasks[number] for number in open_tasks], place)
        # Those that train first: one cell for every network that is missing, then the others.
        broken = run_all(_do, [(str(path), open_tasks[number]) for number in needing], say)
        rest = [number for place_of, number in enumerate(open_tasks) if place_of not in needing]
        return broken + run_all(_do, [(str(path), number) for number in rest], say)


def _do(path: str, number: int) -> tuple[int, list[str]]:
    """In a process of a node: one cell and the networks it needs. How many broke, and the lines that say what was done."""
    if not Path(path).exists():
        raise InputError("out", "must be a folder that every node of the cluster sees", str(Path(path).parent.parent))
    work, lines = read_work(path), list[str]()
    return run([work.tasks[number]], work.place, lines.append), lines


def _first_to_need(tasks: Sequence[Task], place: Place) -> list[int]:
    """The tasks, by number, that are the first to need a network that is not there: others would only wait for them."""
    known: set[str] = set()
    first = []
    for number, task in enumerate(tasks):
        missing = {spec.digest for spec in missing_networks([task.cell], place.store)}
        if missing - known:
            first.append(number)
        known |= missing
    return first


def _absolute(work: Work) -> Work:
    """Nodes have other working folders."""
    data = None if work.data is None else os.path.abspath(work.data)
    return replace(work, folder=os.path.abspath(work.folder), models=os.path.abspath(work.models), data=data, jobs=1, on="processes")


def _written(work: Work) -> Path:
    content = encode(work)
    return write_json(Path(work.folder) / "asked" / f"{digest_of({**content, 'folder': '', 'models': ''})}.json", content)
