"""The only training loop, learning-rate schedules, and their replay in fewer epochs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from expunge import checkpoints, masks
from expunge.batches import Batches, Data, Rows, as_batches, batch_size, device_of, tensors, to_device
from expunge.checks import screened
from expunge.errors import DivergedError, InputError, ModelError
from expunge.modes import in_mode, seeded
from expunge.objective import Batch, Objective, check_labels, cross_entropy
from expunge.progress import track
from expunge.replays import Replays

Losses = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> one loss a sample


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
    `momentum` and `weight_decay` are those of our own optimizer. `freeze` keeps masked weights at zero. `eval_mode` trains with dropout
    off and BatchNorm's statistics fixed. `precision` "bfloat16" computes under autocast; the weights stay as they are.

    Departures: the text gives no weight decay; 1e-4 is the released program's, as are masked weights that may grow back.
    """

    schedule: Schedule = Replay(Steps(), 5)
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 1e-4
    freeze: bool = False
    seed: int = 0
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    eval_mode: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError("batch_size", "must be at least 1", self.batch_size)


def train(
    model: nn.Module,
    data: Data,
    tuning: Tuning,
    objective: Objective = Objective(),
    mask: Mapping[str, Tensor] | None = None,
    after_epoch: Callable[[int], bool | None] | None = None,
    progress: bool = False,
    keep: str | os.PathLike[str] | None = None,
) -> None:
    """Train the model in place, in train mode; `after_epoch(1)` is called when the first epoch is over, and may end the training by True.

    The same seed gives the same weights, bit for bit on the CPU. Parameters that do not require gradients stay. A dataset is cut into
    `tuning.batch_size`; a loader keeps its own batches. `keep` names a file that holds the state after every epoch: a training that was
    stopped, at whatever moment, goes on from there, and ends with the weights it would have had. Without it every call starts anew.

    On CUDA, where the data are tensors on the device, each step is replayed as one CUDA graph.
    """
    batches = as_batches(data, "remain", tuning.batch_size)
    hold = partial(masks.freeze, model, mask) if tuning.freeze and mask is not None else None
    train_phases(model, lambda epoch: [Phase(batches, "remain")], tuning, objective, hold, after_epoch, progress, keep)


@dataclass(frozen=True)
class Training:
    """The arguments of one `train`, for `train_together`."""

    model: nn.Module
    data: Data
    tuning: Tuning
    after_epoch: Callable[[int], bool | None] | None = None
    keep: str | os.PathLike[str] | None = None


def train_together(trainings: Sequence[Training], objective: Objective = Objective(), progress: bool = False) -> None:
    """Several trainings, a step of each in turn; on CUDA each on a stream of its own, so that small networks share the device.

    Each ends with what `train` alone would give, unless its model draws random numbers while it trains (dropout).
    """
    devices = [device_of(each.model) for each in trainings]
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for device in devices]
    for stream in streams:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
    with ExitStack() as stack:
        for device in dict.fromkeys(devices):
            stack.enter_context(seeded(0, device))  # the trainings seed as they go, and end in any order
        running = [(stream, stack.enter_context(closing(_alone(each, objective)))) for stream, each in zip(streams, trainings, strict=True)]
        steps = sum(each.tuning.schedule.epochs for each in trainings)
        ticks = stack.enter_context(closing(track(range(steps), "epochs of training", enabled=progress)))
        while running:
            for stream, steps_of in list(running):
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    ended = next(steps_of, None)
                if ended is None:
                    running.remove((stream, steps_of))
                elif ended:
                    next(ticks, None)
        next(ticks, None)
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def _alone(training: Training, objective: Objective) -> Generator[bool, None, None]:
    batches = as_batches(training.data, "data", training.tuning.batch_size)
    return _steps(
        training.model, lambda epoch: [Phase(batches, "data")], training.tuning, objective, None, training.after_epoch, training.keep
    )


@dataclass(frozen=True)
class Phase:
    """One pass over some data with a loss of its own; `loss` None: the mean of the objective's.

    `loss(model, batch, losses)` returns the number to minimise. `losses(logits, targets)` are the objective's, one a sample; labels are
    looked at in the first epoch. `argument` names the data in an error.
    """

    batches: Batches
    argument: str
    loss: Callable[[nn.Module, Batch, Losses], Tensor] | None = None


def train_phases(
    model: nn.Module,
    phases: Callable[[int], Sequence[Phase]],
    tuning: Tuning,
    objective: Objective = Objective(),
    hold: Callable[[Optimizer], AbstractContextManager[None]] | None = None,
    after_epoch: Callable[[int], bool | None] | None = None,
    progress: bool = False,
    keep: str | os.PathLike[str] | None = None,
) -> None:
    """`train` where an epoch, counted from 0, is one or several phases; they share the optimizer and its state.

    `hold(optimizer)` is entered before the first step: it may keep weights where they are (`masks.freeze`, `masks.only`).
    """
    total = sum(len(phase.batches) for epoch in range(tuning.schedule.epochs) for phase in phases(epoch))
    with closing(_steps(model, phases, tuning, objective, hold, after_epoch, keep)) as steps:
        for _ in track(steps, "training", total, enabled=progress):
            pass


def _steps(
    model: nn.Module,
    phases: Callable[[int], Sequence[Phase]],
    tuning: Tuning,
    objective: Objective,
    hold: Callable[[Optimizer], AbstractContextManager[None]] | None,
    after_epoch: Callable[[int], bool | None] | None,
    keep: str | os.PathLike[str] | None,
) -> Generator[bool, None, None]:
    """A training as a generator: a yield after every step, True where it ended an epoch."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be trained")
    plan = [phases(epoch) for epoch in range(tuning.schedule.epochs)]
    with ExitStack() as stack:
        stack.enter_context(seeded(tuning.seed, device_of(model)))
        stack.enter_context(in_mode(model, training=not tuning.eval_mode))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        optimizer = _optimizer(trainable, tuning)
        if hold is not None:
            stack.enter_context(hold(optimizer))
        settings, device = _settings(tuning, sum(len(phase.batches) for parts in plan for phase in parts)), device_of(model)
        done = checkpoints.load(keep, model, optimizer, settings, device) if keep is not None and os.path.exists(keep) else 0
        update = _Update(model, tuning, objective, optimizer)
        for epoch, parts in enumerate(plan[done:], start=done):
            for _ in _epoch(model, parts, epoch, tuning, objective, update, check=epoch == done):
                yield False
            if keep is not None:
                checkpoints.save(keep, model, optimizer, epoch + 1, settings, device)
            ended = after_epoch is not None and after_epoch(epoch + 1)
            yield True
            if ended:
                break


def _epoch(
    model: nn.Module, phases: Sequence[Phase], epoch: int, tuning: Tuning, objective: Objective, update: _Update, check: bool
) -> Iterator[None]:
    """One epoch, a yield after every step but the last. Data are looked at where `check` is set: it costs time, and on a GPU a wait."""
    device, length, done = device_of(model), sum(len(phase.batches) for phase in phases), 0
    normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
    # Kept on the device and read once an epoch: reading it at every step would make a GPU wait.
    noted = torch.zeros(length, device=device)
    for phase in phases:
        replays = update.replays(phase, device)
        if check and replays is not None:
            _look_at(model, phase, objective)
        losses: Losses = objective.per_sample if check and replays is None else objective.losses
        if replays is not None and phase.batches.rows is not None:
            batches: Iterable[Any] = phase.batches.rows.shuffled(tuning.seed + epoch, device)
        else:
            batches = (screened(phase.batches, phase.argument, objective) if check else phase.batches).shuffled(tuning.seed + epoch)
        for iteration, batch in enumerate(batches):
            if normalises and 0 < iteration == len(phase.batches) - 1 and batch_size(batch) == 1:
                continue  # a lone last sample has no variance, BatchNorm would refuse it
            update.set_rate(tuning.schedule.rate(epoch + (done + iteration) / length))
            loss = update(phase, to_device(batch, device), losses) if replays is None else replays(batch)
            noted[done + iteration].copy_(loss)
            if done + iteration + 1 < length:
                yield
        done += len(phase.batches)
    if len(bad := torch.nonzero(~torch.isfinite(noted))):
        raise DivergedError(f"the loss is no longer finite: epoch {epoch + 1}, iteration {int(bad[0]) + 1} of {length}")


def _settings(tuning: Tuning, steps: int) -> str:
    """What makes a training the same one. The schedule by its rates: its name need not tell."""
    held = {field.name: getattr(tuning, field.name) for field in dataclasses.fields(tuning) if field.name not in ("schedule", "optimizer")}
    rates = [f"{tuning.schedule.rate(epoch):g}" for epoch in range(tuning.schedule.epochs)]
    runs = ", ".join(f"{len(list(equal))}x{rate}" for rate, equal in itertools.groupby(rates))
    return f"{steps} steps, rates by epoch {runs}, " + ", ".join(f"{name} {value}" for name, value in held.items())


class _Update:
    """One step: forward, backward, and the optimizer; on CUDA, where the data allow it, as a graph that is replayed."""

    def __init__(self, model: nn.Module, tuning: Tuning, objective: Objective, optimizer: Optimizer) -> None:
        self.model, self.tuning, self.objective, self.optimizer = model, tuning, objective, optimizer
        self._replays: dict[int, Replays | None] = {}
        self._rate: float | None = None

    def __call__(self, phase: Phase, batch: Batch, losses: Losses) -> Tensor:
        with torch.autocast(device_of(self.model).type, torch.bfloat16, enabled=self.tuning.precision == "bfloat16"):
            loss = (phase.loss or partial(_mean_loss, self.objective))(self.model, batch, losses)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def set_rate(self, rate: float) -> None:
        if rate == self._rate:
            return
        self._rate = rate
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def replays(self, phase: Phase, device: torch.device) -> Replays | None:
        """How to replay this phase's steps from the rows of its data; None where they have to be made one by one."""
        rows, key = phase.batches.rows, id(phase.batches)
        if device.type != "cuda" or rows is None or phase.loss is not None or self.tuning.optimizer is not None:
            return None
        if key not in self._replays:
            on_device = all(tensor.device == device for tensor in tensors(rows.read(torch.zeros(1, dtype=torch.int64, device=device))))
            step = partial(self._from_rows, phase, rows)
            self._replays[key] = Replays(step, partial(self.optimizer.zero_grad, set_to_none=True)) if on_device else None
        return self._replays[key]

    def _from_rows(self, phase: Phase, rows: Rows, chosen: Tensor) -> Tensor:
        return self(phase, rows.read(chosen), self.objective.losses)


def _look_at(model: nn.Module, phase: Phase, objective: Objective) -> None:
    """Look at all of the data before the first step: replayed ones cannot."""
    logits: Tensor | None = None
    with in_mode(model, training=False), torch.no_grad():
        for batch in screened(phase.batches, phase.argument, objective):
            if logits is None:
                logits = objective.outputs(model, batch)
            if objective.losses is cross_entropy:
                check_labels(logits.shape, objective.targets(batch))


def _mean_loss(objective: Objective, model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
    return losses(objective.outputs(model, batch), objective.targets(batch)).mean()


def _optimizer(trainable: list[nn.Parameter], tuning: Tuning) -> Optimizer:
    if tuning.optimizer is not None:
        return tuning.optimizer(trainable)
    rate: float | Tensor = tuning.schedule.rate(0)
    fused = all(parameter.is_cuda for parameter in trainable)
    if fused:
        rate = torch.tensor(rate, device=trainable[0].device)  # there it can change between replays of a captured step
    return SGD(trainable, lr=rate, momentum=tuning.momentum, weight_decay=tuning.weight_decay, fused=fused or None)
