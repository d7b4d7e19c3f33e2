"""Refuse models whose backward pass is not linear in what is sent back, for the kinds that scale it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from expunge.data.batches import take
from expunge.data.objective import Batch, Objective
from expunge.errors import ModelError
from expunge.fisher.comparing import judged
from expunge.fisher.planning.definition import random_like, tolerance
from expunge.fisher.samples import fresh, gradients

SCALE = -0.5  # both a sign and a size: a hook that clips knows sizes, one that drops the negative knows signs


def check_linear(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> None:
    """Raise ModelError where the first sample's gradients of c and of −c/2 are not in this ratio, c random.

    √p_k ∂ log p_k is the gradient of √p_k log p_k only so; hooks and functions of one's own may clip or drop gradients instead.
    """
    with torch.enable_grad():
        logits = objective.logits(model, fresh(take(batch, slice(0, 1))))
    if not logits.requires_grad:
        return
    sent = random_like(logits)
    whole = gradients(logits, parameters, sent, retain_graph=True)
    scaled = gradients(logits, parameters, SCALE * sent)
    expected = {name: None if value is None else SCALE * value for name, value in whole.items()}
    if judged({name: value for name, value in scaled.items() if value is not None}, expected, tolerance):
        raise ModelError(
            "the model changes gradients in its backward pass, and not linearly (hooks or functions that clip or drop them), so "
            'only kind="empirical" is defined'
        )
