"""Run a list of cells that a file holds, in this process or in several that share the work.

    python -m expunge.experiments.worker CELLS.json

`expunge bench run --dry-run --cells CELLS.json` writes such a file, for another machine; needs torch, numpy and safetensors alone. Ends
with 0 where every cell has a result, with 1 where one has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from expunge.errors import InputError
from expunge.experiments.cells import check_cell, digest_of
from expunge.experiments.processes import STARTING, in_processes
from expunge.experiments.results import BROKEN
from expunge.experiments.runner import Place, Task, run
from expunge.runtime.exits import ended, on_one_line
from expunge.runtime.modes import device_named
from expunge.storage.codec import Within, decode, encode
from expunge.storage.documents import excerpt, read_json
from expunge.storage.files import write_json


@dataclass(frozen=True)
class Work:
    """Cells, and where and how to run them; without a `device` on what there is. `jobs` are processes of this machine, unless `on` Ray."""

    tasks: tuple[Task, ...]
    folder: str
    models: str
    data: str | None = None
    device: str | None = None
    together: Annotated[int, Within(1)] = 9
    compiled: bool = False
    keep: bool = False
    jobs: Annotated[int, Within(1)] = 1
    retrained: bool = True
    on: Literal["processes", "ray"] = "processes"

    @property
    def place(self) -> Place:
        device = device_named(self.device)
        return Place(Path(self.folder), Path(self.models), self.data, device, self.together, self.compiled, self.keep, self.retrained)


def read_work(path: str | os.PathLike[str]) -> Work:
    try:
        work = decode(Work, read_json(path), "the list")
        for task in work.tasks:
            check_cell(task.cell)
        return work
    except BROKEN as error:
        rule = f"{os.fspath(path)} must be cells as `expunge bench run --cells` writes them ({excerpt(error)})"
        raise InputError("cells", rule) from error


def run_work(work: Work, say: Callable[[str], None], starting: Callable[[str], None] | None = None, parent: int | None = None) -> int:
    """Do what is not done; return the number of cells, or of processes, that broke. Ends after the cell in hand when a `parent` has."""
    if work.on == "ray":
        from expunge.experiments.on_ray import run_on_ray  # not above: it imports this module

        return run_on_ray(work, say, starting)
    if work.jobs > 1:
        return _in_processes(work, say, starting)
    return run(work.tasks, work.place, say, starting or (lambda label: None), wanted=lambda: parent in (None, os.getppid()))


def _in_processes(work: Work, say: Callable[[str], None], starting: Callable[[str], None] | None) -> int:
    content = encode(replace(work, jobs=1))
    name = digest_of({**content, "folder": "", "models": ""})  # the same wherever the folder is
    path = write_json(Path(work.folder) / "asked" / f"{name}.json", content)
    return in_processes(["-m", "expunge.experiments.worker", str(path)], work.jobs, say, starting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells of one file; workers are also passed their parent's process id, and whether it shows what starts."""
    path, *extra = (sys.argv[1:] if arguments is None else arguments) or [""]
    if not path or len(extra) > 2 or not all(text == STARTING or text.isdecimal() for text in extra):
        raise InputError("cells", "must be one file, as `expunge bench run --cells` writes it", " ".join([path, *extra]) or "none")
    work = read_work(path)

    def say(line: str) -> None:
        print(on_one_line(line), file=sys.stderr, flush=True)

    starting = (lambda label: say(STARTING + label)) if STARTING in extra else None
    run_work(work, say, starting, int(extra[0]) if extra else None)
    place = work.place
    return 0 if all(place.done(task.cell) for task in work.tasks) else 1


if __name__ == "__main__":
    sys.exit(ended(main, "expunge.experiments.worker"))
