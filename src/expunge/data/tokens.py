"""Compute the losses of language models: a distribution over the vocabulary for every token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.data.labels import IGNORED, as_labels, can_be_looked_at
from expunge.data.objective import Batch, Objective, batch_targets
from expunge.errors import InputError


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_t log p(y_t) per sample, over its positions whose target is not −100, from logits (N, T, V) and targets (N, T).

    The logits at position t are the distribution of the target at position t. A sum, not a mean: the joint log-probability of the sample's
    tokens. A mean over a sample's T_n tokens divides its gradient by T_n, and its squares by T_n².
    """
    if logits.dim() != 3 or targets.shape != logits.shape[:2] or targets.is_floating_point():
        rule = f"targets must be token numbers of shape {tuple(logits.shape[:2])}, as the logits (samples, tokens, vocabulary) are"
        raise InputError("batches", rule, f"{targets.dtype} of shape {tuple(targets.shape)} beside logits {tuple(logits.shape)}")
    labels = as_labels(targets)
    if can_be_looked_at(logits):
        counted = labels[labels != IGNORED]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= logits.shape[2]):
            found = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
            raise InputError("batches", f"token numbers must be in [0, {logits.shape[2]}), or {IGNORED} where none is scored", found)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(targets.shape).sum(1)


def next_tokens(batch: Batch) -> Tensor:
    """The targets of a causal model whose labels are its own input: at each position the label of the next; −100 at the last."""
    return F.pad(batch_targets(batch)[:, 1:], (0, 1), value=IGNORED)


TOKENS = Objective(losses=token_cross_entropy, classes=False)  # the targets of each position, as encoders and decoders have them
NEXT_TOKENS = Objective(losses=token_cross_entropy, targets=next_tokens, classes=False)  # labels = input, as causal models have them


def of_tokens(objective: Objective) -> bool:
    """Whether the outputs are distributions over a vocabulary, along the last dimension."""
    return objective.losses is token_cross_entropy
