"""Keep the trainings of a program in a folder, so that the same program, started again after a kill, goes on where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from expunge.data.digest import data_digest
from expunge.errors import InputError, MismatchError
from expunge.storage.files import check_folder
from expunge.storage.tensors import weights_digest
from expunge.training import checkpoints
from expunge.training.carrying import Carried, holds_nothing

EVERY = 5.0  # seconds between two states of a training, at least
SHARE = 20.0  # times as long as the last states of all trainings took to write, at least
LITTLE = 0.05  # seconds: a training with a file of its own writes a state that took less after every epoch
WORTH = 0.5  # seconds: a training that took less is as soon made again as read back


class _Context:
    """The trainings of a context: their folder, how many have begun, and the seconds of those that were not made again."""

    def __init__(self, folder: Path, of: str) -> None:
        self.folder, self.of = folder, of
        self.begun, self.spared = 0, 0.0
        self._digests: dict[int, tuple[Any, str | None]] = {}

    def next_file(self) -> Path:
        self.begun += 1
        return self.folder / f"training-{self.begun:04d}.safetensors"

    def digest(self, source: Any) -> str | None:
        """Of the data, once: a method may train many times on the same, and a gigabyte takes a second."""
        if id(source) not in self._digests:
            self._digests[id(source)] = (source, data_digest(source))  # held, so that no other object gets its id
        return self._digests[id(source)][1]


_contexts: list[_Context] = []  # those that are open
_keepers: WeakSet[Keeper] = WeakSet()  # of trainings that run: side by side they wait for each other's states


@contextmanager
def kept(folder: str | os.PathLike[str], of: str = "") -> Iterator[None]:
    """Within the context every training (`train`, the fine-tuning and trials of `unlearn`) keeps its state in the folder.

    A state is written after an epoch, at most every 5 seconds and so that writing takes no more than a twentieth of the time; a
    training that ends is kept if it took half a second or more. A program that was stopped and is started again, with the same
    folder, makes the same calls: a training that had ended is read back, the one that was stopped goes on from its last state, and
    ends with the weights it would have had. Everything else is computed again.

    Trainings are numbered as they begin. A file is used for a training of its number that begins with the same weights, on the same data
    (where they have a digest, as for `train(keep=)`), with the same settings and the same `of`; any other is replaced. Say by `of` what
    else fixes the program: losses have no digest. A training with callbacks, or with losses that are not expunge's own, begins again
    unless `Carried` says what they hold.

    The files hold weights, the state of the optimizer and of random numbers; no samples. Remove the folder when the program has ended.
    """
    check_folder("folder", folder)
    _contexts.append(_Context(Path(folder), of))
    try:
        yield
    finally:
        _contexts.pop()


def clock() -> float:
    """Seconds, as `time.perf_counter`, in which trainings that are read back take as long as they took when they were made."""
    return time.perf_counter() + (_contexts[-1].spared if _contexts else 0.0)


def can_go_on(plan: Sequence[Sequence[Any]], hold: Any, callbacks: Sequence[Any], carried: Carried | None) -> bool:
    """Whether all is known that a training holds between epochs."""
    losses = [phase.loss for parts in plan for phase in parts]
    if carried is None:
        return all(callback is None for callback in callbacks) and all(map(holds_nothing, (hold, *losses)))
    return carried.of_losses or all(map(holds_nothing, (hold, *losses)))


class Keeper:
    """Where a training keeps its state: in a file of its own, which must fit, or in that of its number in a context."""

    def __init__(self, path: Path, context: _Context | None) -> None:
        self.path, self.context = path, context
        self.settings: dict[str, str] = {}
        self.carried = Carried()
        self.began, self.saved, self.cost = clock(), time.monotonic(), 0.0
        _keepers.add(self)

    @classmethod
    def of(cls, keep: str | os.PathLike[str] | None, goes_on: Callable[[], bool]) -> Keeper | None:
        """The one of a training; None where nothing is to be kept."""
        if keep is not None:
            return cls(Path(keep), None)
        if not _contexts:
            return None
        path = _contexts[-1].next_file()  # also where it is not kept: the numbers are those of all trainings
        return cls(path, _contexts[-1]) if goes_on() else None

    def digest(self, source: Any) -> str | None:
        return data_digest(source) if self.context is None else self.context.digest(source)

    def resumed(
        self, model: nn.Module, optimizer: Optimizer, settings: Mapping[str, str], device: torch.device, epochs: int, carried: Carried
    ) -> int:
        """The number of epochs that are done, and the state after them; 0 where there is no file."""
        self.settings = dict(settings)
        self.carried = carried if self.context is None else Carried.together(seconds=Carried(self._seconds, self._spare), training=carried)
        if self.context is not None:
            self.settings |= {"of": self.context.of, "begins with": weights_digest(model)}
        if not os.path.exists(self.path):
            return 0
        try:
            return checkpoints.load(self.path, model, optimizer, self.settings, device, epochs, self.carried.put)
        except (MismatchError, InputError) as error:
            if self.context is not None:
                self.path.unlink(missing_ok=True)
                return 0
            if isinstance(error, MismatchError):
                raise
            found = error.found if str(self.path) in str(error.found) else f"{self.path}: {error.found}"
            raise InputError("keep", f"{error.rule}; without it the training begins anew", found) from error

    def save(self, model: nn.Module, optimizer: Optimizer, epoch: int, epochs: int, device: torch.device) -> None:
        """Write the state after so many epochs where it is worth it; in a context also where there is room on the disk."""
        ended = epoch == epochs
        if not self._is_due(ended):
            return
        started = time.monotonic()
        with suppress(*[] if self.context is None else [OSError]):  # what is kept there is to save time: the result does not need it
            state = None if ended and self.context is not None else optimizer
            checkpoints.save(self.path, model, state, epoch, self.settings, device, self.carried.get())
        self.saved = time.monotonic()
        self.cost = self.saved - started

    def _is_due(self, ended: bool) -> bool:
        if ended:
            return self.context is None or self._seconds() >= WORTH
        if self.context is None and self.cost < LITTLE:
            return True
        least = 0.0 if self.context is None else EVERY
        return time.monotonic() - self.saved >= max(least, SHARE * sum(keeper.cost for keeper in _keepers))

    def _seconds(self) -> float:
        return clock() - self.began

    def _spare(self, seconds: float) -> None:
        assert self.context is not None
        self.context.spared += seconds
