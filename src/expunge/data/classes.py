"""Whether an objective is one of classes: what a softmax of the logits, their largest or a random label need of it."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.data.labels import IGNORED
from expunge.data.objective import Objective, cross_entropy
from expunge.errors import InputError
from expunge.runtime.modes import seeded


def check_classes(objective: Objective, logits: Tensor, targets: Tensor, why: str) -> None:
    """Refuse an objective whose logits are not those of classes along dimension 1: of a regression, say, or of many labels at once.

    Where targets are labels of the head they are, whatever the loss. With other targets they are where the loss is a function of the
    softmax alone, as with soft labels. `why` begins the error's sentence: "SCRUB needs".
    """
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise InputError("objective", f"{why} logits of shape (N, K, ...) with two classes or more", tuple(logits.shape))
    if objective.losses is cross_entropy:
        return
    labels = isinstance(targets, Tensor) and are_labels(logits.shape, targets)  # an objective of one's own may have others
    if labels and logits.dim() == 2:
        return
    try:
        along = next((each for each in range(1, logits.dim()) if _of_softmax(objective, logits, targets, each)), None)
    except InputError:  # a loss that cannot be asked by itself, such as one that takes half precision alone
        if labels:
            return
        raise
    if along == 1:
        return
    if along is not None:
        raise InputError("objective", f"{why} the classes at dimension 1 of what `outputs` returns, (N, K, ...)", tuple(logits.shape))
    if not labels:
        held = f"{targets.dtype} of shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        found = f"{held} for logits {tuple(logits.shape)}, and losses that take no softmax"
        raise InputError("objective", f"{why} classes: integer labels (N, ...) as targets, in [0, K) for logits (N, K, ...)", found)


def are_labels(logits: torch.Size, targets: Tensor) -> bool:
    """One integer for each row of logits and position, which names an output of the head or is ignored."""
    if targets.is_floating_point() or targets.is_complex() or targets.shape != logits[:1] + logits[2:]:
        return False
    found = targets.long()
    return bool((((found >= 0) & (found < logits[1])) | (found == IGNORED)).all())


def no_labels(logits: torch.Size | None, targets: Tensor) -> bool:
    """Fractions, or a number for each logit as where many labels may be true at once: their values name no output of the head."""
    return targets.is_floating_point() or (logits is not None and targets.shape[1:] == logits[1:])


def _of_softmax(objective: Objective, logits: Tensor, targets: Tensor, dimension: int) -> bool:
    """A loss of the softmax cannot tell the logits from their log-softmax; any other can.

    What rounding may do is measured by the size of the losses, that of equal logits among them: at the true labels they may all be near 0.
    """
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    rows = torch.stack([_losses(objective, each, targets) for each in (wide, wide.log_softmax(dimension), torch.zeros_like(wide))])
    rounding = 16 * torch.finfo(wide.dtype).eps * (1 + wide.logsumexp(dimension).abs().max())
    return bool(torch.isfinite(rows).all() and ((rows[0] - rows[1]).abs() <= rounding * rows.abs().max()).all())


def _losses(objective: Objective, logits: Tensor, targets: Tensor) -> Tensor:
    """As a training has them, of logits with a gradient and free to be changed in place; what is drawn is the same at every call."""
    with seeded(0, logits.device), torch.enable_grad():
        return objective.per_sample(logits.clone().requires_grad_().clone(), targets).detach()
