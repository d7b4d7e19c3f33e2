"""The runner: trains what is missing, runs every cell once, and can be stopped at any moment.

    python -m expunge.experiments.runner CELLS.json --out results/paper [--models FOLDER] [--data FOLDER] [--device cuda] [--jobs 2]

Any number of these may work on one folder, also on other lists of cells: each cell and each training is locked while it is done.
It ends with 0 where every cell has a result, with 1 where one has none.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expunge.errors import ExpungeError, InputError
from expunge.experiments.cells import Cell, digest_of
from expunge.experiments.measuring import is_result, perform, reason, surroundings
from expunge.experiments.networks import Spec, Store, original, retrained
from expunge.experiments.results import BROKEN, Result, check_cell, path_of, read
from expunge.experiments.shapes import check
from expunge.runtime.exits import ended, on_one_line, uninterrupted
from expunge.runtime.modes import device_named, one_thread
from expunge.storage.documents import excerpt, read_json
from expunge.storage.files import write_json
from expunge.storage.locks import held

WAIT = 0.2  # seconds before looking again whether another runner is done


@dataclass(frozen=True)
class Task:
    """A cell, and the experiments that asked for it."""

    cell: Cell
    experiments: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"cell": self.cell.as_json(), "experiments": list(self.experiments)}

    @classmethod
    def from_json(cls, content: Any) -> Task:
        task = cls(Cell.from_json(content["cell"]), tuple(content.get("experiments", ())))
        check(task, Task, "task")
        check_cell(task.cell)
        return task


@dataclass(frozen=True)
class Place:
    """Where results and networks go, where datasets come from, and what computes; `together` and `compiled` are the store's."""

    folder: Path
    models: Path
    data: str | None
    device: torch.device
    together: int = 9
    compiled: bool = False

    @property
    def store(self) -> Store:
        return Store(self.models, self.data, self.device, self.together, self.compiled)

    def result(self, cell: Cell) -> Result | None:
        path = path_of(self.folder, cell.digest)
        return read(path) if path.exists() else None

    def done(self, cell: Cell) -> bool:
        found = self.result(cell)
        return found is not None and found.final


def read_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """The cells of a file, as `expunge bench run --cells` writes it."""
    try:
        content = read_json(path)
        check(content, Sequence[Any], "the list")
        return [Task.from_json(part) for part in content]
    except BROKEN as error:
        rule = f"{os.fspath(path)} must be a list of cells, as `expunge bench run --cells` writes it ({excerpt(error)})"
        raise InputError("cells", rule) from error


def missing_networks(cells: Iterable[Cell], store: Store) -> list[Spec]:
    found = {spec.digest: spec for cell in cells for spec in (original(cell), retrained(cell))}
    return [spec for spec in found.values() if not store.holds(spec)]


def run(
    tasks: Sequence[Task],
    place: Place,
    jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Do what is not done, as long as it is `wanted`; the number of cells that broke. Several `jobs` are processes that share the work."""
    if jobs > 1:
        return _in_processes(tasks, place, jobs, say)
    with one_thread() if place.device.type == "cpu" else torch.cuda.device(place.device):
        return _Runner(tasks, place, say, wanted).run()


class _Runner:
    def __init__(self, tasks: Sequence[Task], place: Place, say: Callable[[str], None], wanted: Callable[[], bool]) -> None:
        self.place, self.store, self.say, self.wanted = place, place.store, say, wanted
        self.pending = [task for task in tasks if not self._noted(task)]
        self.untrained: dict[str, Exception] = {}  # networks that cannot be trained, and why
        self.broken = 0

    def run(self) -> int:
        while self.pending and self.wanted():
            progressed = self._train() or self._cells()
            self.pending = [task for task in self.pending if not self.place.done(task.cell)]
            if self.pending and not progressed:
                time.sleep(WAIT)
        return self.broken

    def _noted(self, task: Task) -> bool:
        """Whether it is done; a result that another experiment asked for before is told that this one needs it too."""
        found = self.place.result(task.cell)
        if found is None or not found.final:
            return False
        if {*task.experiments} - {*found.experiments}:
            path = path_of(self.place.folder, task.cell.digest)
            with held(self.place.folder / "locks" / f"{task.cell.digest}.lock") as free:
                if free:
                    content = read_json(path)
                    write_json(path, content | {"experiments": sorted({*content["experiments"], *task.experiments})})
        return True

    def _train(self) -> bool:
        missing = [spec for spec in missing_networks((task.cell for task in self.pending), self.store) if spec.digest not in self.untrained]
        if not missing:
            return False
        started = time.perf_counter()
        trained, failed = self.store.train(missing)
        self.untrained |= failed
        if trained:
            self.say(f"trained {len(trained)} {trained[0].dataset} {trained[0].network}: {time.perf_counter() - started:.1f} s")
        return bool(trained or failed)

    def _cells(self) -> bool:
        """One pass over what is left; cells whose networks another runner is training have to wait."""
        progressed = False
        for task in list(self.pending):
            if not self.wanted():
                break
            needed = (original(task.cell), retrained(task.cell))
            refused = next((self.untrained[spec.digest] for spec in needed if spec.digest in self.untrained), None)
            if refused is None and not all(self.store.holds(spec) for spec in needed):
                continue
            with held(self.place.folder / "locks" / f"{task.cell.digest}.lock") as free:
                if free and not self.place.done(task.cell):
                    self._do(task, refused)
                    progressed = True
        return progressed

    def _do(self, task: Task, refused: Exception | None) -> None:
        started = time.perf_counter()
        try:
            if refused is None:
                found = perform(task.cell, self.store)
            elif is_result(refused):
                found = {"cell": task.cell.as_json(), "digest": task.cell.digest, "error": reason(refused), "history": [], "seconds": 0.0}
                found |= surroundings(self.place.device)
            else:
                raise refused
        except Exception as error:  # a defect in one cell must not cost the others; it leaves no result, and the run says so
            self.broken += 1
            self.pending.remove(task)
            self.say(f"BROKEN {task.cell.label}: {error if isinstance(error, ExpungeError) else repr(error)}")
            return
        write_json(path_of(self.place.folder, task.cell.digest), found | {"experiments": list(task.experiments)})
        if found["error"] is not None:
            self.pending.remove(task)  # "no data" is not final, but it is for this run
        told = "" if found["error"] is None else f" ({found['error']})"
        self.say(f"{task.cell.label}: {time.perf_counter() - started:.1f} s{told}")


def _in_processes(tasks: Sequence[Task], place: Place, jobs: int, say: Callable[[str], None]) -> int:
    content = [task.as_json() for task in tasks]
    path = write_json(place.folder / "asked" / f"{digest_of(content)}.json", content)
    command = [sys.executable, "-m", "expunge.experiments.runner", str(path), "--out", str(place.folder), "--models", str(place.models)]
    command += ["--worker-of", str(os.getpid()), "--device", str(place.device), "--together", str(place.together)]
    command += ["--compile"] if place.compiled else []
    command += [] if place.data is None else ["--data", place.data]
    runners: list[subprocess.Popen[bytes]] = []
    try:
        with _deaf_to_ctrl_c():
            for _ in range(jobs):
                runners.append(subprocess.Popen(command, env=_same_imports()))
        codes = [runner.wait() for runner in runners]
    except BaseException:
        with uninterrupted():  # a second Ctrl-C must not leave some of them running
            for runner in runners:
                runner.terminate()
            for runner in runners:
                runner.wait()
        raise
    for code in codes:
        if code < 0:  # each tells the rest itself
            say(f"a process was ended by {signal.Signals(-code).name}; the same command does what is left")
    return sum(code != 0 for code in codes)


def _same_imports() -> dict[str, str]:
    """The environment of a process that finds modules where this one does, such as those of methods of one's own."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C, which would end each with a traceback: they are ended by the one that started them.

    That one hears it, when all are started. The mask is what they inherit; it keeps the signal from this thread alone.
    """
    with uninterrupted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m expunge.experiments.runner", description="Run cells; what is done is skipped.")
    parser.add_argument("cells", help="JSON list of cells, as `expunge bench run --dry-run --cells FILE` writes it")
    parser.add_argument("--out", default="results", help="folder for the results")
    parser.add_argument("--models", help="folder for the networks; default: models beside the results")
    parser.add_argument("--data", help="folder of the datasets; default: EXPUNGE_DATA, else ./data")
    parser.add_argument("--device", help="cuda or cpu; default: what there is")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--together", type=int, default=9, help="networks that share a GPU while they are trained")
    parser.add_argument("--compile", action="store_true", help="train networks through torch.compile")
    parser.add_argument("--worker-of", type=int, help="process after whose end this one stops, when the cell in hand is done")
    told = parser.parse_args(arguments)
    if told.jobs < 1:
        raise InputError("jobs", "must be at least 1", told.jobs)
    tasks = read_tasks(told.cells)
    models = Path(told.models or Path(told.out) / "models")
    place = Place(Path(told.out), models, told.data, device_named(told.device), told.together, told.compile)
    run(
        tasks,
        place,
        told.jobs,
        say=lambda line: print(on_one_line(line), file=sys.stderr, flush=True),
        wanted=lambda: told.worker_of in (None, os.getppid()),
    )
    return 0 if all(place.done(task.cell) for task in tasks) else 1


if __name__ == "__main__":
    sys.exit(ended(main, "expunge.experiments.runner"))
