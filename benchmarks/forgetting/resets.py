"""Which weights a trial gives fresh values: by place, by Fisher score, or at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from expunge.editing import masks, scores
from expunge.fisher import FisherSums
from expunge.model import channels
from expunge.model.depth import last_parameters

HEAD = ("classifier.weight", "classifier.bias")


def chosen(model: nn.Module, reset: dict[str, Any], batch, sums: tuple[FisherSums, FisherSums] | None) -> dict[str, Tensor]:
    """A mask of parameters and of BatchNorm's buffers."""
    by = reset["by"]
    if by == "none":
        return {}
    if by == "names":
        return whole(model, [name for name, _ in model.named_parameters() if name.startswith(tuple(reset["names"]))])
    if by == "depth":
        return whole(model, last_parameters(model, batch, reset["share"]))
    score = {name: value for name, value in _score(model, reset, sums).items() if value.dim() > 1}
    inside = tuple(reset.get("inside", ("",)))
    score = {name: value for name, value in score.items() if name.startswith(inside) and (reset.get("head", True) or name not in HEAD)}
    if by == "layers":
        return _layers(model, score, reset["weights"])
    if reset["unit"] == "channel":
        return _channels(model, score, batch, reset["ratio"])
    return masks.select(score, reset["ratio"], reset["unit"])


def whole(model: nn.Module, names) -> dict[str, Tensor]:
    """All of these parameters, and the buffers beside them."""
    prefixes, parameters = {name.rpartition(".")[0] for name in names}, dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    held = [name for name in tensors if name in {*names} or (name.rpartition(".")[0] in prefixes and name not in parameters)]
    return {name: torch.ones_like(tensors[name], dtype=torch.bool) for name in held}


def _score(model: nn.Module, reset: dict[str, Any], sums: tuple[FisherSums, FisherSums] | None) -> dict[str, Tensor]:
    if reset["score"] == "random":
        return scores.random(model, reset.get("seed", 0))
    assert sums is not None
    return (
        scores.fisher_ratio(*sums) if reset["score"] == "ratio" else scores.fisher_difference(*sums, remain_weight=reset.get("lambda", 3.0))
    )


def _layers(model: nn.Module, score: dict[str, Tensor], weights: int) -> dict[str, Tensor]:
    """Whole layers by their mean score, with their BatchNorm, the best first, until so many weights are chosen."""
    names: list[str] = []
    total = 0
    for name in sorted(score, key=lambda name: -float(score[name].mean())):
        if total >= weights:
            break
        total += score[name].numel()
        names += [name, *_beside(model, name)]
    return whole(model, names)


def _beside(model: nn.Module, name: str) -> list[str]:
    """Bias, and scale and shift of the BatchNorm that follows (conv1 → norm1)."""
    module = name.rpartition(".")[0]
    norm = module.replace("conv", "norm")
    return [other for other, _ in model.named_parameters() if other != name and other.rpartition(".")[0] in (module, norm)]


def _channels(model: nn.Module, score: dict[str, Tensor], batch, ratio: float) -> dict[str, Tensor]:
    """Output channels with their BatchNorm; rows of the classifier."""
    layers = [layer for layer in channels.find(model, batch) if f"{layer.name}.weight" in score]
    means = {layer.name: score[f"{layer.name}.weight"].flatten(1).mean(1) for layer in layers}
    return channels.mask(model, layers, masks.select(means, ratio), with_norm=True)


def renew(model: nn.Module, fresh: nn.Module, mask: dict[str, Tensor]) -> int:
    """Fresh values where the mask says so; how many weights (without buffers)."""
    parameters, new = dict(model.named_parameters()), dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    tensors = parameters | dict(model.named_buffers())
    with torch.no_grad():
        for name, part in mask.items():
            tensors[name].copy_(torch.where(part.to(tensors[name].device), new[name], tensors[name]))
    return sum(int(part.sum()) for name, part in mask.items() if name in parameters)
