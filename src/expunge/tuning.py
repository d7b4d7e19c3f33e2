"""The only training loop, learning-rate schedules, and their replay in fewer epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from expunge import masks
from expunge.batches import Batches, Data, as_batches, batch_size, device_of, to_device
from expunge.checks import screened
from expunge.errors import DivergedError, InputError, ModelError
from expunge.modes import in_mode, seeded
from expunge.objective import Batch, Objective
from expunge.progress import track


def _check_positive(argument: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InputError(argument, "must be a positive number", value)


def _check_epochs(value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError("epochs", "must be a whole number, 1 or more", value)


class Schedule(Protocol):
    """A learning rate for every moment of a training of `epochs` epochs; time is counted in epochs."""

    @property
    def epochs(self) -> int: ...

    def rate(self, time: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same rate throughout."""

    base: float
    epochs: int

    def __post_init__(self) -> None:
        _check_positive("base", self.base)
        _check_epochs(self.epochs)

    def rate(self, time: float) -> float:
        return self.base


@dataclass(frozen=True)
class Steps:
    """rate(t) = base · factor^#{d in decays : d ≤ t}, after a linear rise over the first `warmup` epochs.

    The defaults are the paper's training on CIFAR and Tiny-ImageNet (section Experiment, Hyperparameters).
    """

    base: float = 0.1
    epochs: int = 160
    decays: tuple[float, ...] = (80, 120)
    factor: float = 0.1
    warmup: float = 0

    def __post_init__(self) -> None:
        _check_positive("base", self.base)
        _check_positive("factor", self.factor)
        _check_epochs(self.epochs)

    def rate(self, time: float) -> float:
        if time < self.warmup:
            return self.base * time / self.warmup
        # A replayed time is a product of floats: without the margin 2.5 epochs could miss their decay by one step.
        passed = sum(1 for decay in self.decays if time >= decay - 1e-9 * self.epochs)
        return self.base * self.factor**passed


@dataclass(frozen=True)
class Replay:
    """rate(t) = schedule.rate(t · schedule.epochs / epochs): every decay at the same fraction of the training.

    Section Fine-Tuning of the paper, S = `epochs`. Evaluated at every iteration, so Steps() in 5 epochs decays at 2.5 and 3.75.
    """

    schedule: Schedule
    epochs: int = 5

    def __post_init__(self) -> None:
        _check_epochs(self.epochs)

    def rate(self, time: float) -> float:
        return self.schedule.rate(time * self.schedule.epochs / self.epochs)


def replay(schedule: Schedule, epochs: int = 5) -> Replay:
    """The original schedule compressed to fewer epochs."""
    return Replay(schedule, epochs)


@dataclass(frozen=True)
class Tuning:
    """How to train: stochastic gradient descent unless `optimizer` builds another from the trainable parameters.

    The schedule sets the learning rate of whatever optimizer there is, in all its groups, so give Adam a schedule that suits it.
    `momentum` and `weight_decay` are those of our own optimizer. `freeze` keeps masked weights at zero.

    Departures: the text gives no weight decay; 1e-4 is the released program's, as are masked weights that may grow back.
    """

    schedule: Schedule = Replay(Steps(), 5)
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 1e-4
    freeze: bool = False
    seed: int = 0
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError("batch_size", "must be at least 1", self.batch_size)


def train(
    model: nn.Module,
    data: Data,
    tuning: Tuning,
    objective: Objective = Objective(),
    mask: Mapping[str, Tensor] | None = None,
    after_epoch: Callable[[int], None] | None = None,
    progress: bool = False,
) -> None:
    """Train the model in place, in train mode; `after_epoch(1)` is called when the first epoch is over.

    Every call starts anew (no optimizer state is kept), and the same seed gives the same weights, bit for bit on the CPU. Parameters
    that do not require gradients stay. A dataset is cut into `tuning.batch_size`; a loader keeps its own batches.
    """
    batches = as_batches(data, "remain", tuning.batch_size)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be trained")
    with ExitStack() as stack:
        stack.enter_context(seeded(tuning.seed, device_of(model)))
        stack.enter_context(in_mode(model, training=True))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        optimizer = _optimizer(trainable, tuning)
        if tuning.freeze and mask is not None:
            stack.enter_context(masks.freeze(model, mask, optimizer))
        epochs = tuning.schedule.epochs
        ticks = stack.enter_context(closing(track(range(epochs * len(batches)), "training", enabled=progress)))
        for epoch in range(epochs):
            # Data are looked at in the first epoch alone: it costs time, and on a GPU a wait at every batch.
            source = screened(batches, "remain", objective) if epoch == 0 else batches
            _epoch(model, source, epoch, tuning, objective, optimizer, ticks)
            if after_epoch is not None:
                after_epoch(epoch + 1)
        next(ticks, None)  # past the last one, so that the bar is closed


def _epoch(
    model: nn.Module, batches: Batches, epoch: int, tuning: Tuning, objective: Objective, optimizer: Optimizer, ticks: Iterator[int]
) -> None:
    device, length = device_of(model), len(batches)
    normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
    first_bad = torch.full((), -1, device=device)
    for iteration, batch in enumerate(batches.shuffled(tuning.seed + epoch)):
        next(ticks, None)
        if normalises and 0 < iteration == length - 1 and batch_size(batch) == 1:
            continue  # a lone last sample has no variance, BatchNorm would refuse it
        for group in optimizer.param_groups:
            group["lr"] = tuning.schedule.rate(epoch + iteration / length)
        loss = _step(model, to_device(batch, device), objective, optimizer, check=epoch == 0)
        # Noted on the device and read once an epoch: reading it at every step would make a GPU wait.
        first_bad = torch.where((first_bad < 0) & ~torch.isfinite(loss), iteration, first_bad)
    if (bad := int(first_bad)) >= 0:
        raise DivergedError(f"the loss is no longer finite: epoch {epoch + 1}, iteration {bad + 1} of {length}")


def _step(model: nn.Module, batch: Batch, objective: Objective, optimizer: Optimizer, check: bool) -> Tensor:
    logits, targets = objective.outputs(model, batch), objective.targets(batch)
    losses = objective.per_sample(logits, targets) if check else objective.losses(logits, targets)
    loss = losses.mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _optimizer(trainable: list[nn.Parameter], tuning: Tuning) -> Optimizer:
    if tuning.optimizer is not None:
        return tuning.optimizer(trainable)
    return SGD(trainable, lr=tuning.schedule.rate(0), momentum=tuning.momentum, weight_decay=tuning.weight_decay)
