"""Compute the Fisher diagonal by its definition, one sample alone after the other, and compare.

Kept failures carry the text of this file: it uses torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

RELATIVE = 4e-6  # of a tensor's largest entry: what couples samples by less than 1e-6 is taken for rounding, and squares double it
ROUNDING = 1e-20  # of the largest entry of all: a gradient that vanishes but for rounding is about 1e-16 of the others, squared
SINGLE = 1e-3  # in float32 in place of RELATIVE
FAINTEST = 1e-27  # of the largest entry, in float32: gradients below 1e-14 of the largest may be taken for rounding
TINY = 1e-35  # the square of what is hardly a number in float32


def alone(batch: Any, index: int) -> Any:
    """The sample with this number as a batch of its own."""
    if isinstance(batch, dict):
        return {name: value[index : index + 1].clone() for name, value in batch.items()}
    return tuple(value[index : index + 1].clone() for value in batch)


def defined(model: nn.Module, batches: list[Any], objective: Any, kind: str, together: bool = False) -> dict[str, Tensor]:
    """Σ_n (∂ℓ_n)², or Σ_n Σ_k p_k (∂ log p_k)², of a model in eval mode; `together`: with the logits that samples have in their batch."""
    parameters = {name: value for name, value in model.eval().named_parameters() if value.requires_grad}
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    for batch in batches:
        targets = batch["labels"] if isinstance(batch, dict) else batch[-1]
        whole = objective.outputs(model, batch) if together else None
        for index in range(len(targets)):
            logits = objective.outputs(model, alone(batch, index)) if whole is None else whole[index : index + 1].clone()
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
                        totals[name] += weight * gradient.double() ** 2
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


def differences(squares: dict[str, Tensor], reference: dict[str, Tensor], plain: dict[str, Tensor] | None = None) -> dict[str, float]:
    """The parameters that are off, each with its error as a part of the largest entry. `plain`: the same loop as the reference, in float32;
    what it is off by may be rounding."""
    assert squares.keys() == reference.keys(), "other parameters than those that require a gradient"
    largest = max((_size(value) for value in reference.values()), default=0.0)
    off = {}
    for name, value in reference.items():
        error, size = _size(squares[name] - value), _size(value)
        rounding = ROUNDING * largest + RELATIVE * size
        if plain is not None:
            rounding = TINY + FAINTEST * largest + SINGLE * size + 100 * _size(plain[name] - value)
        if not error <= rounding:
            off[name] = error / size if size else float("inf")
    return off


def _size(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def shaken(prepared: Any, batches: Any, objective: Any, kind: str) -> list[dict[str, Tensor]]:
    """The loop in float64 with weights and data that are off by parts of a million, and in float32 in the company of others: what these
    change, rounding to float32 may change."""
    found = [defined(prepared(), batches(), objective, kind, together=True)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def moved(value: Any, generator: torch.Generator = generator) -> Any:
            if not value.is_floating_point():
                return value
            return value * (1 + 1e-6 * torch.randn(value.shape, generator=generator, dtype=value.dtype))

        model = prepared(torch.float64)
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(moved(value))
        data = [
            {name: moved(value) for name, value in batch.items()} if isinstance(batch, dict) else tuple(moved(value) for value in batch)
            for batch in batches(torch.float64)
        ]
        found.append(defined(model, data, objective, kind))
    return found
