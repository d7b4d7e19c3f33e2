"""Compute the Fisher diagonal by its definition, one sample alone after the other, and compare.

Kept failures carry the text of this file: it uses torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

RELATIVE = 4e-6  # of a tensor's largest entry: what couples samples by less than 1e-6 is taken for rounding, and squares double it
ROUNDING = 1e-20  # of the largest entry of all: a gradient that vanishes but for rounding is about 1e-16 of the others, squared


def alone(batch: Any, index: int) -> Any:
    """The sample with this number as a batch of its own."""
    if isinstance(batch, dict):
        return {name: value[index : index + 1].clone() for name, value in batch.items()}
    return tuple(value[index : index + 1].clone() for value in batch)


def defined(model: nn.Module, batches: list[Any], objective: Any, kind: str) -> dict[str, Tensor]:
    """Σ_n (∂ℓ_n)², or Σ_n Σ_k p_k (∂ log p_k)², of a model in eval mode."""
    parameters = {name: value for name, value in model.eval().named_parameters() if value.requires_grad}
    totals = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for batch in batches:
        targets = batch["labels"] if isinstance(batch, dict) else batch[-1]
        for index in range(len(targets)):
            logits = objective.outputs(model, alone(batch, index))
            if kind == "empirical":
                weighted = [(1.0, objective.losses(logits, targets[index : index + 1].clone()).sum())]
            else:
                scores = logits[0].log_softmax(0)
                weighted = [(float(score.detach().exp()), score) for score in scores]
            for weight, value in weighted:
                if not value.requires_grad:
                    continue
                gradients = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
                for name, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        totals[name] += weight * gradient**2
    return totals


def measured(model: nn.Module, batches: list[Any], objective: Any, kind: str, name: str, index: int, step: float = 1e-6) -> float:
    """The same of one entry of a parameter, its derivatives taken as differences of two forward passes: torch's may be wrong."""
    value, total = dict(model.eval().named_parameters())[name].detach(), 0.0
    place = torch.unravel_index(torch.tensor(index), value.shape)
    for batch in batches:
        targets = batch["labels"] if isinstance(batch, dict) else batch[-1]
        for number in range(len(targets)):
            sides = []
            for sign in (1, -2, 1):
                value[place] += sign * step
                logits = objective.outputs(model, alone(batch, number)).detach()
                losses = objective.losses(logits.clone(), targets[number : number + 1].clone())
                sides.append(losses.sum().view(1) if kind == "empirical" else logits[0].log_softmax(0))
            above, below, here = sides
            weights = 1.0 if kind == "empirical" else here.exp()
            total += float((weights * ((above - below) / (2 * step)) ** 2).sum())
    return total


def differences(squares: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """The parameters that are off, each with its error as a part of the largest entry."""
    assert squares.keys() == reference.keys(), "other parameters than those that require a gradient"
    largest = max((float(value.abs().max()) for value in reference.values() if value.numel()), default=0.0)
    off = {}
    for name, value in reference.items():
        error, size = (float(part.abs().max()) if part.numel() else 0.0 for part in (squares[name] - value, value))
        if not error <= RELATIVE * size + ROUNDING * largest:
            off[name] = error / size if size else float("inf")
    return off
