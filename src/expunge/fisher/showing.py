"""Find samples that show the gradient of parameters of which no drawn sample has one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from expunge.data.batches import batch_size, take
from expunge.data.objective import Batch, Objective
from expunge.fisher.comparing import NOISE
from expunge.fisher.planning.definition import random_like
from expunge.fisher.samples import fresh, gradients, sizes_of


def samples_with_gradient(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], names: Sequence[str], batch: Batch, objective: Objective
) -> dict[int, set[str]]:
    """Samples, by number, each with those of these parameters whose gradient it shows.

    Of a parameter it is the first whose gradient is beyond what rounding may be beside those of others, or else the one with the largest.
    """
    missing, having = set(names), defaultdict[int, set[str]](set)
    faint: dict[str, tuple[float, int]] = {}  # the largest so far, and whose it is
    for index in range(batch_size(batch)):
        if not missing:
            break
        with torch.enable_grad():
            logits = objective.logits(model, fresh(take(batch, slice(index, index + 1))))
        if not logits.requires_grad:
            continue
        found = {name: value for name, value in gradients(logits, parameters, random_like(logits)).items() if value is not None}
        sizes = dict(zip(found, (size for _, size in sizes_of([(value, value) for value in found.values()])), strict=True))
        top = max(sizes.values(), default=0.0)
        for name in missing & sizes.keys():
            if sizes[name] > NOISE.get(found[name].dtype, NOISE[torch.float32]) * top:
                having[index].add(name)
            elif sizes[name] > faint.get(name, (0.0, 0))[0]:
                faint[name] = sizes[name], index
        missing -= having.get(index, set())
    for name in missing & faint.keys():
        having[faint[name][1]].add(name)
    return having
