"""Run cells and show their progress: a bar with the current cell on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from expunge.errors import InputError
from expunge.runtime.exits import on_one_line

if TYPE_CHECKING:
    from expunge.experiments.worker import Work

Say = Callable[[str], None]


def jobs_for(device: str, jobs: int | None, on: str = "processes") -> int:
    """As many processes as were asked for; else one on a GPU, one per core on a CPU."""
    if jobs is not None and on == "ray":
        raise InputError("jobs", "are processes of this machine; leave it out with --on ray, where the cluster has its own", jobs)
    if jobs is not None and jobs < 1:
        raise InputError("jobs", "must be at least 1", jobs)
    return jobs or (1 if device == "cuda" else min(8, os.cpu_count() or 1))


def run_shown(work: Work, quiet: bool = False) -> int:
    """Do what is not done yet; return the number of cells that have no result afterwards. Without a line where `quiet`."""
    from expunge.experiments.worker import run_work

    place = work.place
    with _listening(work, quiet) as (say, starting):
        run_work(work, say, starting)
    return sum(not place.done(task.cell) for task in work.tasks)


@contextmanager
def _listening(work: Work, quiet: bool) -> Iterator[tuple[Say, Say | None]]:
    """What to do with a line, and with what is about to be done (None: nothing)."""
    if quiet:
        yield (lambda line: _print(line) if line.startswith("BROKEN") else None), lambda label: None
    elif sys.stderr.isatty():
        with _bar(work) as listeners:
            yield listeners
    else:
        yield _print, None


def _print(line: str) -> None:
    print(on_one_line(line), file=sys.stderr, flush=True)


@contextmanager
def _bar(work: Work) -> Iterator[tuple[Say, Say | None]]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column
        from rich.text import Text
    except ImportError:
        yield _print, None
        return
    from expunge.experiments.results import path_of

    common = set.intersection(*({*task.cell.label.split()} for task in work.tasks)) if len(work.tasks) > 1 else set()
    paths = [path_of(work.folder, task.cell.digest) for task in work.tasks]
    narrow = Column(no_wrap=True, min_width=7)
    at_work = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    columns = (BarColumn(bar_width=12), MofNCompleteColumn(table_column=narrow), TimeRemainingColumn(True, table_column=narrow), at_work)
    with Progress(*columns, console=Console(stderr=True), expand=True) as bars:
        bar = bars.add_task("", total=len(paths), completed=sum(path.exists() for path in paths))

        def say(line: str) -> None:
            bars.console.print(Text(on_one_line(line)), soft_wrap=True)
            bars.update(bar, completed=sum(path.exists() for path in paths))

        def starting(label: str) -> None:
            """What sets a cell apart from the others: the line is short."""
            bars.update(bar, description=on_one_line(" ".join(word for word in label.split() if word not in common)))

        yield say, starting
