"""Give a method what it needs beside its settings: how to read data, edit weights, train, and record the model after every epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expunge.data.batches import Batches, Data, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.labels import IGNORED
from expunge.data.objective import Objective
from expunge.editing.masks import masked_parameters
from expunge.editing.patches import Patch
from expunge.errors import InputError, NoEffectWarning
from expunge.methods.choosing.choice import Choice
from expunge.model import channels, heads
from expunge.model.checks import screened
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import in_mode, seeded
from expunge.training import holding
from expunge.training.carrying import Carried, holds_nothing
from expunge.training.distillation import Distillation
from expunge.training.loop import Loss, Phase, check_training, train_phases
from expunge.training.teaching import distilled, teach
from expunge.training.tuning import Tuning
from expunge.validate import shown

OR_NO_TUNING = "pass remain data, or tuning=None"  # advice for methods that need remain data to fine-tune only


@dataclass(frozen=True)
class Run:
    """How a method reads data, edits weights and trains.

    `head` names the classifier's parameters (None: read from the graph). `batch_size` is for measuring; a `Tuning` has its own. `logits` is
    the shape of the model's output for some batch. `original` and `forget` are what `unlearn` was given; a distilled training needs both.

    `after_epoch(epoch)` records the model. `train` calls it before any training (epoch 0) and after every epoch. A method with a loop of
    its own calls it itself. `epochs` are those recorded so far.

    For a method that chooses among others: `validation` are data that the model was never trained on, where there are any. `take_records()`
    takes all records of a trial out of the history, `put_records` puts them back; `tell(method, choice)` names the method that was used.
    `history` is what all records are, for a training that goes on after a kill.
    """

    objective: Objective = Objective()
    head: tuple[str, ...] | None = None
    batch_size: int = 128
    progress: bool = False
    after_epoch: Callable[[int], None] = lambda epoch: None
    logits: torch.Size | None = None
    epochs: list[int] = field(default_factory=list, repr=False, compare=False)
    original: nn.Module | None = field(default=None, repr=False)
    forget: Data | None = field(default=None, repr=False)
    validation: Data | None = None
    take_records: Callable[[], Any] = lambda: None
    put_records: Callable[[Any], None] = lambda records: None
    tell: Callable[[Method, Choice], None] = lambda method, choice: None
    history: Carried = field(default=Carried(of_losses=False), repr=False)

    def edit(self, model: nn.Module, values: Mapping[str, Tensor]) -> Patch:
        """Set parameters and buffers in place: by name to these values, or to zero where a mask (bool) is true.

        Return what was changed, for the method to return. A mask that changes nothing is a `NoEffectWarning`.
        """
        if not isinstance(values, Mapping):
            raise InputError("values", "must map names of parameters or buffers to tensors", shown(values))
        if strange := [name for name, value in values.items() if not isinstance(value, Tensor)]:
            raise InputError("values", "must map names of parameters or buffers to tensors", f"{strange[0]}: {shown(values[strange[0]])}")
        masks = {name: value for name, value in values.items() if value.dtype == torch.bool}
        if len(masks) == len(values):
            patch = Patch.zeroing(model, masks)
        else:
            # Detached: a graph of the weights that is alive while they are trained keeps CUDA from capturing the steps.
            parts = masked_parameters(model, masks)
            zeroed = {name: parameter.detach().masked_fill(part, 0) for name, (parameter, part) in parts.items()}
            patch = Patch.setting(model, {**values, **zeroed})
        if (masks or not values) and all(torch.equal(edit.old, edit.new) for edit in patch.edits.values()):
            # Otherwise what training alone forgets would be taken for the mask's work.
            named = f"all {len(patch)} weights it names are zero already" if len(patch) else "it names no weight; give a larger ratio"
            warnings.warn(f"the mask changed nothing: {named}", NoEffectWarning, stacklevel=level_of_caller())
        patch.apply(model)
        return patch

    def train(
        self,
        model: nn.Module,
        data: Data,
        tuning: Tuning | None,
        loss: Loss | None = None,
        mask: Mapping[str, Tensor] | None = None,
        argument: str = "remain",
        until: Callable[[], bool] | None = None,
        state: Carried | None = None,
    ) -> None:
        """Train the model in place; None trains nothing. There is a record before, and one after every epoch.

        `loss(model, batch, losses)` is the number to minimise for a batch in place of the objective's mean; `losses(logits, targets)` are
        the objective's, one per sample. With `tuning.distillation` the original's answers count too. Weights that `mask` names stay zero
        where `tuning.freeze` says so. `argument` names the data in an error. `until()` is asked after every epoch; True stops
        early. `state` is what the loss and `until` hold between epochs, for a training that goes on after a kill (`training.kept`); without
        it a training by functions of your own begins again.
        """
        if tuning is None:
            return self.begin()
        check_training(model, tuning, self.objective)
        if tuning.distillation is None:
            phase = Phase(as_batches(data, argument, tuning.batch_size), argument, loss)
        elif loss is None:
            phase, tuning = self._distilled(data, tuning, tuning.distillation, argument), replace(tuning, distillation=None)
        else:
            raise InputError("tuning", "a method with a loss of its own cannot distil; leave distillation None", tuning.distillation)
        hold = partial(holding.freeze, model, mask) if mask is not None and tuning.freeze else None
        self.train_phases(model, lambda epoch: [phase], tuning, hold, until, state)

    def _distilled(self, data: Data, tuning: Tuning, distillation: Distillation, argument: str) -> Phase:
        if self.original is None:
            raise InputError("original", "distillation needs the original network as teacher", "None")
        without = self.forgotten_classes(data, distillation.without)
        taught = teach(data, self.original, self.objective, tuning.batch_size, without, argument)
        return distilled(taught, distillation, argument, self.objective)

    def forgotten_classes(self, remain: Data, named: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Classes that are forgotten as a whole: those named, or labels of the forget data that no remain sample has.

        With names the forget data are not read.
        """
        if named == ():
            return ()
        kept = self._labels(remain, "remain")
        if named is None:
            return () if kept is None or self.forget is None else tuple(sorted((self._labels(self.forget, "forget") or set()) - kept))
        if kept is not None and (both := sorted({*named} & kept)):
            raise InputError("remain", f"must not hold samples of the forgotten classes {named}; leave them out", both)
        return named

    def _labels(self, data: Data, argument: str) -> set[int] | None:
        """All labels; None where targets are no labels."""
        labels: set[int] = set()
        for batch in self.batches(data, argument):
            targets = self.objective.targets(batch)
            if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
                return None
            labels |= {*targets.unique().tolist()}
        return labels - {IGNORED}

    def train_phases(
        self,
        model: nn.Module,
        phases: Callable[[int], Sequence[Phase]],
        tuning: Tuning,
        hold: Callable[[Optimizer], AbstractContextManager[None]] | None = None,
        until: Callable[[], bool] | None = None,
        state: Carried | None = None,
    ) -> None:
        """`train` where an epoch, counted from 0, is several passes, or where weights are kept in place (`training.holding`).

        `until()` is asked after every epoch; True stops early. `state` as for `train`.
        """
        self.begin()
        done = max(self.epochs, default=0)  # a second training counts on

        def after_epoch(epoch: int) -> bool:
            ended = until is not None and until()  # first: it may raise, and a lost network needs no record
            self.after_epoch(done + epoch)
            return ended

        carried = Carried.together(history=self.history, **({} if state is None else {"method": state}))
        known = carried if state is not None or holds_nothing(until) else None
        train_phases(model, phases, tuning, self.objective, hold, after_epoch, self.progress, carried=known)

    def begin(self) -> None:
        """Record epoch 0, the model before any training, unless there is such a record."""
        if not self.epochs:
            self.after_epoch(0)

    def batches(self, data: Data, argument: str) -> Batches:
        """Batches to measure with, checked as they are read."""
        return screened(as_batches(data, argument, self.batch_size), argument, self.objective, self.logits)

    def head_of(self, model: nn.Module, data: Data) -> tuple[str, ...]:
        if self.head is not None:
            return self.head
        return heads.find(model, next(iter(self.batches(data, "forget"))), self.objective)

    def layers_of(self, model: nn.Module, data: Data, include_head: bool) -> tuple[channels.Layer, ...]:
        """The layers whose channels may be masked."""
        head = () if include_head else self.head_of(model, data)
        return channels.find(model, next(iter(self.batches(data, "forget"))), self.objective, head)


class Method(Protocol):
    """Settings that can be called. The call changes the model in place and returns what it edited before any training, or None."""

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch | None: ...


def needs_remain(remain: Data | None, why: str, advice: str = "pass remain data") -> None:
    if remain is None:
        raise InputError("remain", f"{why} needs the data to keep; {advice}", "None")


def class_shape(model: nn.Module, forget: Data, run: Run, why: str) -> torch.Size:
    """The shape of the logits of one forget batch, which must be class logits."""
    device = device_of(model)
    with seeded(0, device), in_mode(model, training=False), torch.no_grad():
        batch = to_device(next(iter(run.batches(forget, "forget"))), device)
        logits = run.objective.logits(model, batch).shape
    check_classes(run.objective, logits, why)
    return logits


def check_tuning(settings: Tuning | None, method: str = "") -> None:
    """Require a `Tuning`, or None unless `method` names a method that cannot do without."""
    if not isinstance(settings, Tuning) and (method or settings is not None):
        rule = f"{method} trains, and needs a Tuning" if method else "must be a Tuning, or None for no training"
        raise InputError("tuning", rule, shown(settings))
