"""Train what is missing and run every cell once; resume after a stop at any moment.

Any number of processes may work on one folder, also on other lists of cells: each cell and each training is locked while it is done.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from expunge.errors import ExpungeError
from expunge.experiments.cells import Cell
from expunge.experiments.measuring import is_result, perform, reason, save, surroundings
from expunge.experiments.networks import Spec, Store
from expunge.experiments.results import Result, path_of, read
from expunge.runtime.modes import one_thread
from expunge.storage.codec import decode, encode
from expunge.storage.files import write_json
from expunge.storage.locks import try_lock

WAIT = 0.2  # seconds before checking again whether another runner is done


@dataclass(frozen=True)
class Task:
    """A cell, and the experiments that asked for it."""

    cell: Cell
    experiments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where results and networks go, where datasets come from, and what computes; `together`, `compiled` and `retrained` are the store's.

    The network of every cell is kept beside its result where `keep` is set.
    """

    folder: Path
    models: Path
    data: str | None
    device: torch.device
    together: int = 9
    compiled: bool = False
    keep: bool = False
    retrained: bool = True

    def network(self, cell: Cell) -> Path:
        """Where the network of a cell is kept."""
        return path_of(self.folder, cell.digest).with_suffix(".safetensors")

    @property
    def store(self) -> Store:
        return Store(self.models, self.data, self.device, self.together, self.compiled, self.retrained)

    def result(self, cell: Cell) -> Result | None:
        path = path_of(self.folder, cell.digest)
        return read(path) if path.exists() else None

    def done(self, cell: Cell) -> bool:
        result = self.result(cell)
        return result is not None and result.final and (not self.keep or result.error is not None or self.network(cell).exists())


def missing_networks(cells: Iterable[Cell], store: Store) -> list[Spec]:
    needed = {spec.digest: spec for cell in cells for spec in store.needed(cell)}
    return [spec for spec in needed.values() if not store.holds(spec)]


def run(
    tasks: Sequence[Task],
    place: Place,
    say: Callable[[str], None] = lambda line: None,
    starting: Callable[[str], None] = lambda label: None,
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Do what is not done, as long as it is `wanted`; return the number of cells that broke.

    `say` is called with a line when something is done, `starting` with what is about to be.
    """
    with one_thread() if place.device.type == "cpu" else torch.cuda.device(place.device):
        return _Runner(tasks, place, say, starting, wanted).run()


class _Runner:
    def __init__(
        self,
        tasks: Sequence[Task],
        place: Place,
        say: Callable[[str], None],
        starting: Callable[[str], None],
        wanted: Callable[[], bool],
    ) -> None:
        self.place, self.store, self.say, self.starting, self.wanted = place, place.store, say, starting, wanted
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
        """Whether it is done; in a result of another experiment, note that this one needs it too."""
        result = self.place.result(task.cell)
        if result is None or not self.place.done(task.cell):
            return False
        if {*task.experiments} - {*result.experiments}:
            path = path_of(self.place.folder, task.cell.digest)
            with try_lock(self.place.folder / "locks" / f"{task.cell.digest}.lock") as free:
                if free:
                    stored = read(path)
                    write_json(path, encode(replace(stored, experiments=tuple(sorted({*stored.experiments, *task.experiments})))))
        return True

    def _train(self) -> bool:
        missing = [spec for spec in missing_networks((task.cell for task in self.pending), self.store) if spec.digest not in self.untrained]
        if not missing:
            return False
        started = time.perf_counter()
        self.starting(f"training {missing[0].dataset} {missing[0].network}")
        trained, failed = self.store.train(missing)
        self.untrained |= failed
        if trained:
            data = " ".join(map(str, trained[0].data.values())) if len(trained) == 1 else "networks"
            self.say(f"trained {len(trained)} {trained[0].dataset} {trained[0].network} {data}: {time.perf_counter() - started:.1f} s")
        return bool(trained or failed)

    def _cells(self) -> bool:
        """One pass over what is left; cells whose networks another runner is training have to wait."""
        progressed = False
        for task in list(self.pending):
            if not self.wanted():
                break
            needed = self.store.needed(task.cell)
            failure = next((self.untrained[spec.digest] for spec in needed if spec.digest in self.untrained), None)
            if failure is None and not all(self.store.holds(spec) for spec in needed):
                continue
            with try_lock(self.place.folder / "locks" / f"{task.cell.digest}.lock") as free:
                if free and not self.place.done(task.cell):
                    self._do(task, failure)
                    progressed = True
        return progressed

    def _do(self, task: Task, failure: Exception | None) -> None:
        started = time.perf_counter()
        self.starting(task.cell.label)
        try:
            result, network = self._result(task.cell, failure)
            content = encode(replace(result, experiments=task.experiments))
            decode(Result, content, "result")  # one that cannot be read again would stop every later command on this folder
        except Exception as error:  # a defect in one cell must not cost the others; it leaves no result, and the run says so
            self.broken += 1
            self.pending.remove(task)
            self.say(f"BROKEN {task.cell.label}: {error if isinstance(error, ExpungeError) else _defect(error)}")
            return
        if network is not None and self.place.keep:
            save(network, task.cell, self.store, self.place.network(task.cell))
        write_json(path_of(self.place.folder, result.digest), content)
        if result.error is not None:
            self.pending.remove(task)  # "no data" is not final, but it is for this run
        why = "" if result.error is None else f" ({result.error})"
        self.say(f"{task.cell.label}: {time.perf_counter() - started:.1f} s{why}")

    def _result(self, cell: Cell, failure: Exception | None) -> tuple[Result, nn.Module | None]:
        if failure is None:
            return perform(cell, self.store)
        if not is_result(failure):
            raise failure
        return Result(cell, cell.digest, 0.0, **surroundings(self.place.device), error=reason(failure)), None


def _defect(error: Exception) -> str:
    """With the line that raised it, which may be of a method of one's own."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error!r} ({frame.filename}, line {frame.lineno})"
