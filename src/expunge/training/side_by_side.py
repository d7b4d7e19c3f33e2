"""Train several models side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from torch import nn

from expunge.data.batches import Data, as_batches, device_of
from expunge.data.objective import Objective
from expunge.runtime.modes import Generators, seeded, uncached
from expunge.runtime.progress import track
from expunge.training.loop import Phase, check_training, steps
from expunge.training.tuning import Tuning


@dataclass(frozen=True)
class Training:
    """The arguments of one `train`, for `train_together`; `note_loss(epoch, mean of its steps)` is called before `after_epoch`."""

    model: nn.Module
    data: Data
    tuning: Tuning
    after_epoch: Callable[[int], bool | None] | None = None
    keep: str | os.PathLike[str] | None = None
    note_loss: Callable[[int, float], None] | None = None


def train_together(trainings: Sequence[Training], objective: Objective = Objective(), progress: bool = False) -> None:
    """Run several trainings, a step of each in turn; on CUDA each on its own stream, so that small networks share the device.

    Each ends with what `train` alone would give. On CUDA the trainings share the device's random numbers, so there this does not hold for
    trainings that draw some (dropout, augmentation).
    """
    for training in trainings:
        check_training(training.model, training.tuning, objective)
    phases = [Phase(as_batches(training.data, "data", training.tuning.batch_size), "data") for training in trainings]
    total = sum(training.tuning.schedule.epochs * len(phase.batches) for training, phase in zip(trainings, phases, strict=True))
    with ExitStack() as stack:
        for device in dict.fromkeys(device_of(training.model) for training in trainings):
            stack.enter_context(seeded(0, device))  # the trainings seed as they go, and end in any order
        stack.enter_context(torch.inference_mode(False))  # and the first to end must not switch gradients off for the others
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncached())
        turns = []
        for training, phase in zip(trainings, phases, strict=True):
            turns.append(_Turn(stack.enter_context(closing(_alone(training, phase, objective))), device_of(training.model)))
            stack.callback(turns[-1].join)
        for _ in track(_in_turn(turns), "training", total, enabled=progress):
            pass


def _alone(training: Training, phase: Phase, objective: Objective) -> Generator[None, None, None]:
    return steps(
        training.model, lambda epoch: [phase], training.tuning, objective, None, training.after_epoch, training.keep, training.note_loss
    )


def _in_turn(turns: Sequence[_Turn]) -> Iterator[None]:
    running = list(turns)
    while running:
        for turn in list(running):
            if turn.step():
                yield
            else:
                running.remove(turn)


class _Turn:
    """One of several trainings: on CUDA with a stream of its own, on the CPU with random numbers of its own."""

    def __init__(self, steps: Generator[None, None, None], device: torch.device) -> None:
        self.steps = steps
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.generators: Generators | None = None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def step(self) -> bool:
        """Make a step; False where none was left."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                return self._step()
        if self.generators is not None:
            self.generators.restore()
        stepped = self._step()
        self.generators = Generators.now()
        return stepped

    def _step(self) -> bool:
        return next(self.steps, self) is None

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
