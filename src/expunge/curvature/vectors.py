"""Compute with vectors over the parameters of a model: one tensor per name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.model.checks import check_module

Vector = dict[str, Tensor]  # parameter name -> float64 tensor of the parameter's shape
Parts = Sequence[Tensor]  # of a vector, in the order of its names


def scaled(target: Vector) -> tuple[list[Tensor], float]:
    """v / unit and the unit, the power of two next to v's largest entry: exact, and no square of v / unit under- or overflows."""
    parts = [part.double() for part in target.values()]
    largest = float(torch.stack([part.abs().max() for part in parts if part.numel()]).max())
    exponent = min(max(math.frexp(largest)[1], -1000), 1000)  # so that the unit and its inverse are floats
    return [part * 2.0**-exponent for part in parts], 2.0**exponent


def plus(first: Parts, factor: float, second: Parts) -> list[Tensor]:
    return [one + factor * other for one, other in zip(first, second, strict=True)]


def become(parts: Parts, values: Parts) -> None:
    for part, value in zip(parts, values, strict=True):
        part.copy_(value)


def inner(parts: Parts, vector: Parts) -> Tensor:
    return torch.stack([(part * other.to(part)).sum() for part, other in zip(parts, vector, strict=True)]).sum()


def dot(first: Parts, second: Parts) -> float:
    return float(inner(first, second))


def norm(parts: Parts) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()


def check_vector(argument: str, model: nn.Module, vector: Mapping[str, Tensor]) -> None:
    check_module(model)
    named = dict(model.named_parameters())
    if not vector or (unknown := [name for name in vector if name not in named]):
        raise InputError(argument, "must name parameters of the model", unknown if vector else "none")
    for name, part in vector.items():
        if part.shape != named[name].shape:
            raise InputError(argument, f"{name} must have shape {tuple(named[name].shape)}", tuple(part.shape))
