"""Train a model: the one loop that every training goes through."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expunge.data.batches import Batches, Data, Rows, as_batches, device_of, to_device
from expunge.data.calling import RAW, not_about_inputs, unusable
from expunge.data.objective import Batch, Objective, check_objective, model_outputs
from expunge.errors import InputError, ModelError, naming
from expunge.model.checks import check_finite, check_module, finite_tensors, screened, sparse_tables
from expunge.model.copying import put_back_on_error, unwrapped
from expunge.runtime.cuda_graphs import GraphedStep
from expunge.runtime.modes import hooked, in_mode, seeded
from expunge.runtime.nested import tensors
from expunge.runtime.progress import is_shown, track
from expunge.storage.files import check_file
from expunge.training import holding, sharing
from expunge.training.carrying import Carried
from expunge.training.explosion import Explosion
from expunge.training.fused import fused
from expunge.training.identity import settings_of
from expunge.training.keeping import Keeper, can_go_on
from expunge.training.optimizers import build_optimizer, rate_at
from expunge.training.schedules import Constant, Replay, Schedule, Steps, replay
from expunge.training.single_samples import SingleSampleFilter
from expunge.training.tuning import Precision, Tuning
from expunge.validate import shown

__all__ = [
    "Constant",
    "Loss",
    "Losses",
    "Phase",
    "Precision",
    "Replay",
    "Schedule",
    "Steps",
    "Tuning",
    "replay",
    "steps",
    "train",
    "train_phases",
]

Losses = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> one loss per sample
Loss = Callable[[nn.Module, Batch, Losses], Tensor]  # (model, batch, losses) -> the number to minimise


def train(
    model: nn.Module,
    data: Data,
    tuning: Tuning,
    objective: Objective = Objective(),
    mask: Mapping[str, Tensor] | None = None,
    after_epoch: Callable[[int], bool | None] | None = None,
    progress: bool | None = None,
    keep: str | os.PathLike[str] | None = None,
) -> None:
    """Train the model in place, in train mode. `after_epoch(1)` is called after the first epoch; return True to stop early.

    An `ExpungeError` (wrong data, a training that diverges) leaves the model as it was before the call.

    The same seed gives the same weights, bit for bit on the CPU. Parameters that do not require gradients stay; weights that `mask` names
    stay zero, whatever the optimizer does (`holding.freeze`). A dataset is cut into batches of `tuning.batch_size`; a loader keeps its own.
    `progress` None: shown where standard error is a terminal or a notebook runs.

    `keep` names a file for the state after every epoch; where writing it takes 0.05 s or more, for a state so often that this takes no
    more than a twentieth of the time, and for the last. A training that was stopped resumes from there, and ends with the weights it would
    have had. `after_epoch` comes before the file is written, so it may be called twice for the epoch in which a training was stopped.
    Without `keep` every call starts anew.

    A file of a training with other settings or on other data raises `MismatchError`. Data are compared bit for bit, by the tensors of a
    TensorDataset or of our images, or by the numbers in a dataset's `targets`; also in a Subset, a ConcatDataset or a loader. Other changes
    (of batches in a list, of anything else in your own dataset, of the objective) are not noticed.

    On CUDA, where the data are tensors on the device and the model has no hooks, each step runs as one CUDA graph.
    """
    model = unwrapped(model) if sharing.is_shared() else model
    check_training(model, tuning, objective)
    batches = as_batches(data, "data", tuning.batch_size)
    hold = partial(holding.freeze, model, mask) if mask is not None else None
    if keep is not None:
        check_file("keep", keep)
    with put_back_on_error(model):
        train_phases(model, lambda epoch: [Phase(batches, "data")], tuning, objective, hold, after_epoch, is_shown(progress), keep)


def check_training(model: nn.Module, tuning: Tuning, objective: Objective) -> None:
    check_module(model)
    if (made := next((name for name, value in model.named_parameters() if value.is_inference()), None)) is not None:
        raise ModelError(f"model: {made} was made under torch.inference_mode() and cannot be trained; build the model outside")
    if not isinstance(tuning, Tuning):
        raise InputError("tuning", "must be a Tuning, such as Tuning(Constant(0.01, epochs=5))", shown(tuning))
    check_objective(objective)


@dataclass(frozen=True)
class Phase:
    """One pass over some data with a loss of its own; `loss` None: the mean of the objective's.

    `loss(model, batch, losses)` returns the number to minimise. `losses(logits, targets)` are the objective's, one per sample; labels
    are checked in the first epoch. `argument` names the data in an error. `samples(batch)` is the part of a batch that the objective reads.
    `graphable` says that the loss is tensor operations alone, so that a CUDA graph may hold its steps; `mean` that it is a mean over the
    samples of a batch, so that processes may share it.
    """

    batches: Batches
    argument: str
    loss: Loss | None = None
    samples: Callable[[Batch], Batch] = lambda batch: batch
    graphable: bool = False
    mean: bool = False


def train_phases(
    model: nn.Module,
    phases: Callable[[int], Sequence[Phase]],
    tuning: Tuning,
    objective: Objective = Objective(),
    hold: Callable[[Optimizer], AbstractContextManager[None]] | None = None,
    after_epoch: Callable[[int], bool | None] | None = None,
    progress: bool = False,
    keep: str | os.PathLike[str] | None = None,
    carried: Carried | None = None,
) -> None:
    """`train` where an epoch, counted from 0, is one or several phases; they share the optimizer and its state.

    `hold(optimizer)` is entered before the first step: it may keep weights where they are (`holding.freeze`, `holding.only`). `carried` is
    what `after_epoch`, and losses of your own, hold between epochs: a training with them goes on within `training.kept` if it is given.
    """
    total = sum(len(phase.batches) for epoch in range(tuning.schedule.epochs) for phase in phases(epoch))
    with closing(steps(model, phases, tuning, objective, hold, after_epoch, keep, carried=carried)) as training:
        for _ in track(training, "training", total, enabled=progress):
            pass


def steps(
    model: nn.Module,
    phases: Callable[[int], Sequence[Phase]],
    tuning: Tuning,
    objective: Objective,
    hold: Callable[[Optimizer], AbstractContextManager[None]] | None,
    after_epoch: Callable[[int], bool | None] | None,
    keep: str | os.PathLike[str] | None,
    note_loss: Callable[[int, float], None] | None = None,
    carried: Carried | None = None,
) -> Generator[None, None, None]:
    """A training as a generator: it yields after every step, and after an epoch's last step once all work of the epoch is done."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be trained")
    if tuning.distillation is not None:
        rule = "distillation is for methods that fine-tune on the remain data, in `unlearn`; leave it None here"
        raise InputError("tuning", rule, tuning.distillation)
    if tuning.optimizer is None and tuning.weight_decay and (tables := sparse_tables(model)):
        rule = f"weight_decay must be 0 where gradients are sparse, as those of {tables[0]} (Embedding(sparse=True))"
        raise InputError("tuning", rule, tuning.weight_decay)
    plan = [phases(epoch) for epoch in range(tuning.schedule.epochs)]
    with ExitStack() as stack:
        stack.enter_context(seeded(tuning.seed, device_of(model)))
        stack.enter_context(in_mode(model, training=not tuning.eval_mode))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        optimizer = build_optimizer(trainable, tuning)
        if hold is not None:
            stack.enter_context(hold(optimizer))
        device, done = device_of(model), 0
        settings: dict[str, str] = {}
        shares = sharing.is_shared()
        explosion = Explosion(tuning, objective)
        keeper = Keeper.of(keep, lambda: can_go_on(plan, hold, (after_epoch, note_loss), carried))
        if keeper is not None or shares:
            settings = settings_of(tuning, optimizer, plan, *(() if keeper is None else (keeper.digest,)))
        if keeper is not None:
            held = Carried.together(explosion=explosion.carried(device), callbacks=carried or Carried())
            done = keeper.resumed(model, optimizer, settings, device, len(plan), held)
        share = stack.enter_context(sharing.Share.of(model, tuning, plan, settings, done)) if shares else None
        update, finite = _Update(model, tuning, objective, optimizer, explosion, share), finite_tensors(model)
        stack.callback(update.release)
        for epoch, parts in enumerate(plan[done:], start=done):
            loss = yield from _epoch(model, parts, epoch, tuning, objective, update, check=epoch == done)
            check_finite(model, finite, f"after epoch {epoch + 1}")
            if note_loss is not None:
                note_loss(epoch + 1, loss)
            ended = after_epoch is not None and after_epoch(epoch + 1)
            # Not before: what comes after an epoch may draw random numbers, and has to be repeated where it was not finished.
            if keeper is not None and (share is None or share.first):
                keeper.save(model, optimizer, len(plan) if ended else epoch + 1, len(plan), device)
            yield
            if ended:
                break


def _epoch(
    model: nn.Module, phases: Sequence[Phase], epoch: int, tuning: Tuning, objective: Objective, update: _Update, check: bool
) -> Generator[None, None, float]:
    """Train one epoch, yielding after every step but the last; return its mean loss. `check` checks the data, which costs time and makes
    a GPU wait."""
    device, length, done, made = device_of(model), sum(len(phase.batches) for phase in phases), 0, 0
    # Kept on the device and read once per epoch: reading it at every step would make a GPU wait.
    noted = torch.zeros(length, device=device)
    for phase in phases:
        with seeded(tuning.seed, device):  # reading may draw random numbers, and these are not the training's
            graphed = update.graphed_step(phase, device)
            if check and graphed is not None:
                _check_data(model, phase, objective)
        losses: Losses = objective.per_sample if check and graphed is None else objective.losses
        if graphed is not None and phase.batches.rows is not None:
            samples: Callable[[Any], Batch] = partial(_samples_of_rows, phase, phase.batches.rows)
            batches: Iterable[Any] = phase.batches.rows.shuffled(tuning.seed + epoch, device)
        else:
            samples = phase.samples
            batches = (screened(phase.batches, phase.argument, objective) if check else phase.batches).shuffled(tuning.seed + epoch)
        for iteration, batch in enumerate(update.single_samples.kept(batches, phase.argument, samples)):
            update.set_rate(rate_at(tuning, epoch + (done + iteration) / length))
            with naming(phase.argument):
                loss = update(phase, to_device(batch, device), losses) if graphed is None else graphed(batch)
            noted[done + iteration].copy_(loss)
            made += 1
            if done + iteration + 1 < length:
                yield
        done += len(phase.batches)
    plain = all(phase.loss is None for phase in phases)
    if update.share is not None:
        update.share.check_batches()
    update.explosion.check(noted, epoch, [phase.batches.source for phase in phases] if plain else None)
    return float(noted.sum()) / made


class _Update:
    """One step: forward, backward, and the optimizer; on CUDA, where the data allow it, as a CUDA graph."""

    def __init__(
        self,
        model: nn.Module,
        tuning: Tuning,
        objective: Objective,
        optimizer: Optimizer,
        explosion: Explosion,
        share: sharing.Share | None = None,
    ) -> None:
        self.model, self.tuning, self.objective, self.optimizer, self.share = model, tuning, objective, optimizer, share
        self.single_samples, self.explosion = SingleSampleFilter(model, objective), explosion
        self._graphed: dict[int, GraphedStep[Tensor] | None] = {}
        self._rate: float | None = None

    def __call__(self, phase: Phase, batch: Batch, losses: Losses) -> Tensor:
        low = self.tuning.precision == "bfloat16"
        with torch.autocast(device_of(self.model).type, torch.bfloat16) if low else nullcontext():  # else as the caller has it
            loss = self._loss(phase, batch, losses) if self.share is None else self._part_of_loss(self.share, phase, batch, losses)
        if not loss.requires_grad:
            raise ModelError("model: its outputs have no gradients (a forward pass under no_grad, or with detach): it cannot be trained")
        self.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if self.share is None else self.share.together():
            loss.backward()
        self.optimizer.step()
        return loss.detach() if self.share is None else self.share.whole_loss

    def _part_of_loss(self, share: sharing.Share, phase: Phase, batch: Batch, losses: Losses) -> Tensor:
        """The loss of this process's part of the batch; its gradients are added to those of the others."""
        loss = share.loss(lambda own: self._loss(phase, own, losses), batch)
        share.settle(self.explosion)
        return loss

    def _loss(self, phase: Phase, batch: Batch, losses: Losses) -> Tensor:
        try:
            if phase.loss is not None:
                return _number(phase.loss(self.model, batch, losses))
            logits = self.objective.logits(self.model, batch)
            loss = losses(logits, self.objective.targets(batch)).mean()
            self.explosion.begin(loss, logits.shape)
            return loss
        except RAW as error:
            if not_about_inputs(error):
                raise
            raise unusable(self.model, batch, error) from error

    def set_rate(self, rate: float) -> None:
        if rate == self._rate:
            return
        self._rate = rate
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def graphed_step(self, phase: Phase, device: torch.device) -> GraphedStep[Tensor] | None:
        """This phase's step as a CUDA graph that reads rows of the data; None where steps must run eagerly."""
        rows, key = phase.batches.rows, id(phase.batches)
        if device.type != "cuda" or rows is None or self.share is not None or self.tuning.optimizer is not None or hooked(self.model):
            return None
        if phase.loss is not None and not phase.graphable:
            return None
        if key not in self._graphed:
            step, clear = partial(self._from_rows, phase, rows), partial(self.optimizer.zero_grad, set_to_none=True)
            self._graphed[key] = GraphedStep(step, clear) if _on_device(rows, device) else None
        return self._graphed[key]

    def release(self) -> None:
        """Free the CUDA graphs and their memory at once: they refer to this object, and would wait for the garbage collector with it."""
        self._graphed.clear()

    def _from_rows(self, phase: Phase, rows: Rows, chosen: Tensor) -> Tensor:
        with fused(self.objective.outputs is model_outputs):  # others may differentiate twice, or call the model in their own way
            return self(phase, to_device(rows.read(chosen), chosen.device), self.objective.losses)


def _samples_of_rows(phase: Phase, rows: Rows, chosen: Tensor) -> Batch:
    return phase.samples(rows.read(chosen))


def _on_device(rows: Rows, device: torch.device) -> bool:
    try:
        sample = rows.read(torch.zeros(1, dtype=torch.int64, device=device))
    except Exception:  # a user's dataset that cannot take rows from there
        return False
    return all(tensor.device == device for tensor in tensors(sample))


def _check_data(model: nn.Module, phase: Phase, objective: Objective) -> None:
    """Check all of the data before the first step: a CUDA graph cannot."""
    logits: torch.Size | None = None
    with naming(phase.argument), in_mode(model, training=False), torch.no_grad():
        for batch in map(phase.samples, screened(phase.batches, phase.argument, objective)):
            first = logits is None
            logits = objective.logits(model, batch).shape if logits is None else logits
            objective.check_batch(logits, batch, same_batch=first)


def _number(loss: Any) -> Tensor:
    """Require that a user's loss returned one number to minimise."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError("loss", "must return the number to minimise, a tensor of one value that depends on the weights", shape)
