"""Slow and obvious: what the fast code must equal. Each function is the formula, one sample at a time."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def fisher(
    model: nn.Module, batch: tuple[Tensor, Tensor], kind: str = "empirical", dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Σ_n (∂ log p(y_n|x_n))², or Σ_n Σ_y p(y|x_n) (∂ log p(y|x_n))², by one backward pass a sample (and label)."""
    model = copy.deepcopy(model).to(dtype).eval()
    parameters = dict(model.named_parameters())
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    for x, y in zip(*batch, strict=True):
        scores = model((x.to(dtype) if x.is_floating_point() else x)[None])[0].log_softmax(0)
        labels = [int(y)] if kind == "empirical" else range(len(scores))
        for label in labels:
            weight = 1.0 if kind == "empirical" else float(scores[label].detach().exp())
            gradients = torch.autograd.grad(scores[label], list(parameters.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    totals[name] += weight * gradient.double() ** 2
    return totals


def batch_fisher(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The released program's rule on one batch: Σ_y p̄(y) (∂ mean loss to y)²."""
    model = copy.deepcopy(model).eval()
    probabilities = model(batch[0]).softmax(1).mean(0)
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for label in range(len(probabilities)):
        model.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), torch.full_like(batch[1], label)).backward()
        for name, value in model.named_parameters():
            totals[name] += float(probabilities[label].detach()) * value.grad**2
    return totals


def worst_error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor: ‖found − reference‖ / ‖reference‖."""
    assert found.keys() == reference.keys()
    worst = 0.0
    for name, value in reference.items():
        difference, size = float((found[name] - value).norm()), float(value.norm())
        if difference:
            worst = max(worst, difference / size if size else float("inf"))
    return worst
