"""Compute logits, targets and one loss per sample from a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expunge.data.calling import RAW, call_by_name, described, error_summary, not_about_inputs, unusable
from expunge.data.labels import as_labels, can_be_looked_at, check_form, check_labels, check_likely_labels
from expunge.errors import InputError
from expunge.runtime.nested import Batch
from expunge.validate import check_flag, is_whole, shown

LABEL_KEYS = ("labels", "label", "targets", "target", "y")


def model_outputs(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Call the model with everything but the targets, and take the logits out of what it returns.

    A mapping's entries are passed by name. A single entry whose name the model's forward does not know is the first argument.
    """
    if isinstance(batch, Mapping):
        key = _label_key(batch)
        output = call_by_name(model, {name: value for name, value in batch.items() if name != key})
    else:
        output = model(*_pair(batch)[:-1])
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if logits is None and isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        logits = output[0]
    if not isinstance(logits, Tensor):
        form = f"{type(output).__name__} {described(output)}" if isinstance(output, (Mapping, tuple, list)) else type(output).__name__
        rule = "the model must return logits as a tensor, .logits or ['logits']; else give Objective(outputs=...), which takes them out"
        raise InputError("objective", rule, form)
    return logits


def batch_targets(batch: Batch) -> Tensor:
    """The last entry of a tuple, or the label key of a mapping; integers of any size as int64."""
    targets = batch[_label_key(batch)] if isinstance(batch, Mapping) else _pair(batch)[-1]
    if not isinstance(targets, Tensor):
        raise InputError("batches", "targets must be a tensor, such as torch.tensor(labels)", type(targets).__name__)
    return as_labels(targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p(y|x) per sample, summed over its positions where logits are (N, K, ...)."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    labels = targets if targets.is_floating_point() else targets.long()
    losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


@dataclass(frozen=True)
class Objective:
    """Three functions that connect any model and any batch; replace any of them by your own.

    `losses(logits, targets)` must return one loss per sample, shape (N,): the negative log-likelihood. `classes` says whether the outputs
    are class logits (N, K, ...), a softmax over dimension 1, and the targets labels in [0, K) or probabilities: True or False beside
    your own loss; the default loss always has classes. Where it is None with your own loss, methods that need classes raise.
    """

    outputs: Callable[[Callable[..., Any], Batch], Tensor] = model_outputs
    targets: Callable[[Batch], Tensor] = batch_targets
    losses: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    classes: bool | None = None

    def __post_init__(self) -> None:
        for argument in ("outputs", "targets", "losses"):
            function = getattr(self, argument)
            if not callable(function) or isinstance(function, type):
                raise InputError(f"objective.{argument}", "must be a function, or an object that can be called as one", shown(function))
        if self.classes is not None:
            check_flag("objective.classes", self.classes)
            object.__setattr__(self, "classes", bool(self.classes))  # of NumPy
        if self.classes is False and self.losses is cross_entropy:
            raise InputError("objective.classes", "must be True with the default loss, which is of classes; give losses=... too", False)

    @property
    def of_classes(self) -> bool:
        """Whether the outputs are class logits: as `classes` says, and always with the default loss."""
        return self.losses is cross_entropy if self.classes is None else self.classes

    def logits(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Call `outputs`. An error of a model that cannot take the batch is raised as one that names both."""
        try:
            logits = self.outputs(model, batch)
        except RAW as error:
            if not_about_inputs(error):
                raise
            raise unusable(model, batch, error) from error
        if not isinstance(logits, Tensor) or logits.dim() == 0:
            form = "a single number" if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError("objective.outputs", "must return the logits, a tensor with a row for each sample", form)
        return logits

    def check_targets(self, logits: torch.Size, targets: Tensor, same_batch: bool = True) -> None:
        """Labels must be inside the head, whatever the loss is called; `same_batch`: the logits are those of these targets.

        Targets that are no tensor are left to the losses, and so are all targets with `classes=False`.
        """
        if not isinstance(targets, Tensor) or self.classes is False:
            return
        own = getattr(self.losses, "ignore_index", None)  # torch's modules have it
        ignored = own if is_whole(own) else None
        if not self.of_classes:
            return check_likely_labels(logits, targets, ignored)
        if same_batch:
            check_form(logits, targets)
        check_labels(logits, targets, ignored)

    def check_batch(self, logits: torch.Size, batch: Batch, same_batch: bool = False) -> None:
        """`check_targets` of a batch; a batch needs no targets where the outputs are not of classes."""
        try:
            targets = self.targets(batch)
        except RAW as error:
            if self.of_classes and not_about_inputs(error):
                raise
            if isinstance(error, InputError):
                return
            rule = f"must find the targets in a batch, and raised {error_summary(error)}"
            raise InputError("objective.targets", rule, described(batch)) from error
        self.check_targets(logits, targets, same_batch)

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The losses, checked: one value per sample, labels inside the head."""
        if can_be_looked_at(logits):
            self.check_targets(logits.shape, targets)
        try:
            losses = self.losses(logits, targets)
        except RAW as error:
            if not_about_inputs(error):
                raise
            rule = f"must take the logits and the targets, and raised {error_summary(error)}"
            raise InputError("objective.losses", rule, f"logits {described(logits)} and targets {described(targets)}") from error
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != tuple(logits.shape[:1]):
            rule = f"must return one loss per sample, shape {tuple(logits.shape[:1])}, as torch's losses do with reduction='none'"
            raise InputError("objective.losses", rule, shape)
        return losses


def check_objective(objective: Any) -> None:
    if not isinstance(objective, Objective):
        raise InputError("objective", "must be an Objective, such as Objective(losses=...)", shown(objective))


def _label_key(batch: Mapping[str, Any]) -> str:
    for key in LABEL_KEYS:
        if key in batch:
            return key
    raise InputError("batches", f"a mapping needs one of the keys {', '.join(LABEL_KEYS)}", sorted(map(str, batch)))


def _pair(batch: Batch) -> Sequence[Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise InputError("batches", "a batch must be (inputs, targets) or a mapping of tensors", type(batch).__name__)
    return batch
