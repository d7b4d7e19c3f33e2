"""What a method is told beside its settings, and what every method ends with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from expunge.data.batches import Batches, Data, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.objective import Objective
from expunge.editing.patches import Patch
from expunge.errors import InputError, NoEffectWarning, naming
from expunge.model import channels, heads
from expunge.model.checks import screened
from expunge.runtime.modes import in_mode, seeded
from expunge.training import loop as tuning
from expunge.training.tuning import Tuning
from expunge.validate import shown


@dataclass(frozen=True)
class Run:
    """`head` names the classifier's parameters (None: found from the graph); `batch_size` is for measuring, a `Tuning` has its own;
    `logits` is the shape of what the model puts out for some batch."""

    objective: Objective = Objective()
    head: tuple[str, ...] | None = None
    batch_size: int = 128
    progress: bool = False
    after_epoch: Callable[[int], None] = lambda epoch: None
    logits: torch.Size | None = None

    def batches(self, data: Data, argument: str) -> Batches:
        """Batches to measure with, looked at as they are read."""
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
    """Settings that can be called: changes the given model, and returns what it set before any training (a mask, noise), if anything."""

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch | None: ...


def needs_remain(remain: Data | None, why: str) -> None:
    if remain is None:
        raise InputError("remain", f"{why} needs the data to keep", "None")


def class_shape(model: nn.Module, forget: Data, run: Run, why: str) -> torch.Size:
    """The shape of some logits of the forget data, which must be of classes."""
    device = device_of(model)
    with seeded(0, device), in_mode(model, training=False), torch.no_grad():
        batch = to_device(next(iter(run.batches(forget, "forget"))), device)
        logits = run.objective.logits(model, batch).shape
    check_classes(run.objective, logits, why)
    return logits


def check_tuning(settings: Tuning | None, method: str = "") -> None:
    """A `Tuning`; or none, where no `method` that cannot do without is named."""
    if not isinstance(settings, Tuning) and (method or settings is not None):
        rule = f"{method} trains, and needs a Tuning" if method else "must be a Tuning, or None for no training"
        raise InputError("tuning", rule, shown(settings))


def tune(model: nn.Module, remain: Data | None, settings: Tuning | None, run: Run, mask: Mapping[str, Tensor] | None = None) -> None:
    """Fine-tune on the remain data, epoch 0 being the model as it is handed over (section Fine-Tuning); `freeze` holds the mask at zero."""
    run.after_epoch(0)
    if settings is not None:
        with naming("remain"):
            frozen = mask if settings.freeze else None
            tuning.train(model, remain, settings, run.objective, frozen, run.after_epoch, run.progress)


def mask_and_tune(model: nn.Module, mask: Mapping[str, Tensor], remain: Data | None, settings: Tuning | None, run: Run) -> Patch:
    """Set the masked weights to zero, then fine-tune."""
    patch = Patch.zeroing(model, mask)
    _warn_where_nothing_changes(patch)
    patch.apply(model)
    tune(model, remain, settings, run, mask)
    return patch


def change_and_tune(
    model: nn.Module,
    values: Mapping[str, Tensor],
    remain: Data | None,
    settings: Tuning | None,
    run: Run,
    mask: Mapping[str, Tensor] | None = None,
) -> Patch:
    """Give these parameters and buffers these values, then fine-tune; what a `mask` names can be frozen at zero."""
    patch = Patch.setting(model, values)
    if mask is not None:
        _warn_where_nothing_changes(patch)
    patch.apply(model)
    tune(model, remain, settings, run, mask)
    return patch


def _warn_where_nothing_changes(patch: Patch) -> None:
    """No weight was chosen, or those that were are zero already: whatever is forgotten then, fine-tuning did it."""
    if all(torch.equal(edit.old, edit.new) for edit in patch.edits.values()):
        chosen = f"all {len(patch)} weights it names are zero already" if len(patch) else "it names no weight; give a larger ratio"
        warnings.warn(f"the mask changed nothing: {chosen}", NoEffectWarning, stacklevel=2)
