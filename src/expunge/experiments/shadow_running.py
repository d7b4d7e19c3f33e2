"""Train the shadows of an audit and have them forget: in this process, in several of this machine, or on a Ray cluster.

    python -m expunge.experiments.shadow_running SHADOWS.json SECONDS

does a part of them in another process; `expunge audit --shadows` writes the file and starts these. All work goes by the folder's locks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from expunge.errors import ExpungeError, InputError, MismatchError
from expunge.experiments.cells import digest_of
from expunge.experiments.cluster import cluster
from expunge.experiments.processes import STARTING, in_processes
from expunge.experiments.shadow_work import Prepared, ShadowWork, prepare, read_shadow_work
from expunge.requests.request import told
from expunge.runtime.exits import ended, on_one_line
from expunge.runtime.modes import device_named, threads
from expunge.storage.codec import encode
from expunge.storage.documents import read_json
from expunge.storage.files import write_json

PLAN = "plan.json"
PROGRESS = "{} of {} shadows {}"
Say = Callable[[str], None]


def check_plan(prepared: Prepared) -> None:
    """Raise where the folder holds shadows of another audit."""
    path = Path(prepared.ensemble.folder) / PLAN
    if not path.exists():
        return
    kept, plan = read_json(path), prepared.ensemble.plan
    if not isinstance(kept, dict) or (other := [name for name, value in plan.items() if kept.get(name) != value]):
        what = ", ".join(other) if isinstance(kept, dict) else "all"
        raise MismatchError(f"{path.parent} holds shadows of another audit: {what} differ; choose another folder for these, or remove it")


def run_shadows(
    work: ShadowWork,
    say: Say,
    seconds: float | None = None,
    jobs: int = 1,
    on: Literal["processes", "ray"] = "processes",
    progress: bool | None = None,
) -> int:
    """Do what is not done, and begin nothing that may not end within `seconds`; the number of processes, or of tasks, that broke."""
    work = _absolute(work)
    prepared = prepare(work)
    check_plan(prepared)
    if on == "ray":
        return _on_ray(work, prepared, say, seconds)
    if jobs > 1:
        cores = os.cpu_count() or 1
        path = _written(replace(work, threads=work.threads or max(1, cores // jobs)), prepared)
        text = "none" if seconds is None else str(seconds)
        return in_processes(["-m", "expunge.experiments.shadow_running", str(path), text], jobs, say, lambda label: None)
    _written(work, prepared)
    do_shadows(work, prepared, say, seconds, progress=progress)
    return 0


def do_shadows(
    work: ShadowWork,
    prepared: Prepared,
    say: Say,
    seconds: float | None = None,
    among: Sequence[int] | None = None,
    wanted: Callable[[], bool] = lambda: True,
    progress: bool | None = False,
) -> None:
    """Train those that are free and not done, then have those that are trained forget."""
    started, ensemble = time.monotonic(), prepared.ensemble

    def noted(what: str) -> Callable[[int], bool]:
        def note(done: int) -> bool:
            say(PROGRESS.format(done, ensemble.number, what))
            return wanted()

        return note

    with nullcontext() if work.threads is None else threads(work.threads), told(say):
        ensemble.train(seconds, progress, among, noted("trained"))
        left = None if seconds is None else seconds - (time.monotonic() - started)
        if wanted() and (left is None or left > 0):
            ensemble.unlearn(prepared.method, None, left, progress, among, noted("forgot"))


def _on_ray(work: ShadowWork, prepared: Prepared, say: Say, seconds: float | None) -> int:
    """A task for every group of shadows that are trained side by side. A task that begins after the time does nothing."""
    ensemble, method = prepared.ensemble, prepared.method
    with cluster(device_named(work.device).type) as run_all:
        path = _written(replace(work, threads=work.threads or 1), prepared)
        missing = ensemble.missing(method)
        groups = [missing[start : start + work.at_once] for start in range(0, len(missing), work.at_once)]
        until = None if seconds is None else time.time() + seconds
        return run_all(_do, [(str(path), group, until) for group in groups], say)


def _do(path: str, shadows: Sequence[int], until: float | None) -> tuple[int, list[str]]:
    """In a process of a node: some shadows. How many broke, and the lines that say what was done."""
    if not Path(path).exists():
        raise InputError("out", "must be a folder that every node of the cluster sees", str(Path(path).parent))
    if until is not None and time.time() > until:
        return 0, []
    work, lines = read_shadow_work(path), list[str]()
    try:
        do_shadows(work, prepare(work), lines.append, among=shadows)
    except ExpungeError as error:
        return 1, [*lines, f"BROKEN shadows {', '.join(map(str, shadows))}: {error}"]
    return 0, lines


def _absolute(work: ShadowWork) -> ShadowWork:
    """Nodes have other working folders."""
    task, before, data = (None if path is None else os.path.abspath(path) for path in (work.task, work.before, work.data))
    file, colon, name = work.method.rpartition(":")
    method = f"{os.path.abspath(file)}:{name}" if colon and file.endswith(".py") else work.method
    dataset = os.path.abspath(work.dataset) if os.path.isdir(work.dataset) else work.dataset  # a folder of pictures
    return replace(work, folder=os.path.abspath(work.folder), task=task, before=before, data=data, method=method, dataset=dataset)


def _written(work: ShadowWork, prepared: Prepared) -> Path:
    """The plan, by which the folder is known again, and the work for other processes."""
    content = encode(work)
    write_json(Path(work.folder) / PLAN, prepared.ensemble.plan)
    return write_json(Path(work.folder) / "asked" / f"{digest_of({**content, 'folder': ''})}.json", content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do a part of the shadows of one file; processes that another started are passed its id, and end after what is in hand with it."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if not 2 <= len(given) <= 4 or not all(text == STARTING or text.isdecimal() for text in given[2:]):
        rule = "must be one file, as `expunge audit --shadows` writes it, and seconds or none"
        raise InputError("shadows", rule, " ".join(given) or "nothing")
    path, seconds, *extra = given
    parent = next((int(text) for text in extra if text.isdecimal()), None)

    def say(line: str) -> None:
        print(on_one_line(line), file=sys.stderr, flush=True)

    work = read_shadow_work(path)
    limit = None if seconds == "none" else float(seconds)
    do_shadows(work, prepare(work), say, limit, wanted=lambda: parent in (None, os.getppid()))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main, "expunge.experiments.shadow_running"))
