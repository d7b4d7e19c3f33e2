"""How a batch becomes logits, targets and one loss a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expunge.errors import InputError

Batch = Any  # (inputs..., targets) as a tuple or list, or a mapping with a label key; anything, with an Objective of one's own
LABEL_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # the label torch.nn.functional.cross_entropy leaves out


def model_outputs(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Call the model with everything but the targets, and take the logits out of what it returns."""
    if isinstance(batch, Mapping):
        key = _label_key(batch)
        output = model(**{name: value for name, value in batch.items() if name != key})
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
        raise InputError("objective", "the model must return logits as a tensor, .logits or ['logits']", type(output).__name__)
    return logits


def batch_targets(batch: Batch) -> Tensor:
    """The last entry of a tuple, or the label key of a mapping."""
    targets = batch[_label_key(batch)] if isinstance(batch, Mapping) else _pair(batch)[-1]
    if not isinstance(targets, Tensor):
        raise InputError("batches", "targets must be a tensor", type(targets).__name__)
    return targets


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p(y|x) of each sample, summed over its positions where logits are (N, K, ...)."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def check_labels(logits: torch.Size, targets: Tensor) -> None:
    """Integer labels must name an output of the head (on CUDA the kernel would otherwise abort the process).

    The logits may be of another batch: samples and positions are not compared, which `check_form` does.
    """
    if len(logits) < 2 or targets.numel() == 0:
        return
    soft = targets.is_floating_point()
    if targets.dim() != (len(logits) if soft else len(logits) - 1) or (soft and targets.shape[1] != logits[1]):
        raise _bad_form(logits, targets)
    if soft:
        return
    if targets.dtype != torch.int64:
        raise InputError("batches", "integer targets must be int64", targets.dtype)
    counted = targets[targets != IGNORED] if len(logits) > 2 else targets
    if counted.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(counted))
    if low < 0 or high >= logits[1]:
        raise InputError("batches", f"labels must be in [0, {logits[1]}), the outputs of the head", low if low < 0 else high)


def check_form(logits: torch.Size, targets: Tensor) -> None:
    """What cross-entropy takes: logits (N, K, ...) with labels (N, ...), or with probabilities of the logits' own shape."""
    if len(logits) < 2:
        raise InputError("objective", "cross-entropy needs logits of shape (N, K, ...); give an Objective with other losses", tuple(logits))
    if targets.shape != (logits if targets.is_floating_point() else logits[:1] + logits[2:]):
        raise _bad_form(logits, targets)


def _bad_form(logits: torch.Size, targets: Tensor) -> InputError:
    labels = f"integer labels of shape ({', '.join(['N', *map(str, logits[2:])])}{',' if len(logits) == 2 else ''})"
    rule = f"targets must be {labels} or probabilities of shape ({', '.join(['N', *map(str, logits[1:])])}), as the logits are"
    return InputError("batches", rule, f"{targets.dtype} of shape {tuple(targets.shape)}")


@dataclass(frozen=True)
class Objective:
    """Three functions that connect any model and any batch; each can be replaced by one's own.

    `losses(logits, targets)` must return one loss a sample, shape (N,): the negative log-likelihood.
    """

    outputs: Callable[[Callable[..., Any], Batch], Tensor] = model_outputs
    targets: Callable[[Batch], Tensor] = batch_targets
    losses: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The losses, checked: one finite-shaped value a sample, labels inside the head."""
        # A capture cannot look at values: the batches before it and the one it is made from were looked at.
        if self.losses is cross_entropy and not (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
            check_form(logits.shape, targets)
            check_labels(logits.shape, targets)
        losses = self.losses(logits, targets)
        if losses.shape != logits.shape[:1]:
            raise InputError("objective.losses", f"must return one loss a sample, shape {tuple(logits.shape[:1])}", tuple(losses.shape))
        return losses


def _label_key(batch: Mapping[str, Any]) -> str:
    for key in LABEL_KEYS:
        if key in batch:
            return key
    raise InputError("batches", f"a mapping needs one of the keys {', '.join(LABEL_KEYS)}", sorted(map(str, batch)))


def _pair(batch: Batch) -> Sequence[Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise InputError("batches", "a batch must be (inputs, targets) or a mapping of tensors", type(batch).__name__)
    return batch
