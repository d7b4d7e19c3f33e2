"""Square the gradient of a batch, as the released program does: kept to reproduce it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from expunge.data.objective import Batch, Objective
from expunge.errors import InputError
from expunge.fisher.closed_forms.scratch import wide
from expunge.fisher.samples import Squares, fresh


def batch_squares(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> Squares:
    """Σ_y p̄(y) · (∂ mean_n −log p(y|x_n))² of one batch, p̄ the mean probability over the batch.

    A square of a sum over samples, not a sum of squares: it depends on the batch size and on which samples share a batch.
    """
    with torch.enable_grad():
        logits = objective.logits(model, fresh(batch))
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise InputError("kind", "the batch rule needs logits of shape (N, K) with K of at least 2", tuple(logits.shape))
        losses = -wide(logits).log_softmax(1).mean(0)
    chances = logits.detach().double().softmax(1).mean(0)
    squares = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    if not losses.requires_grad:
        return squares
    for label, chance in enumerate(chances):
        gradients = torch.autograd.grad(losses[label], list(parameters.values()), retain_graph=label + 1 < len(chances), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                squares[name].add_(gradient.double().square() * chance)
    return squares
