"""Tell samples a model was trained on from others by its loss on them."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.metrics.accuracy import check_numbers
from expunge.metrics.predictions import Predictions, check_predictions


def loss_attack(samples: Predictions, unseen: Predictions, objective: Objective = Objective()) -> float:
    """P(ℓ(sample) < ℓ(unseen)) + ½·P(ℓ(sample) = ℓ(unseen)): the area under the curve of "a lower loss means that it was seen".

    About 0.5 for a model that never saw the samples, where `unseen` are like them (of the same classes, from the same source); above, it
    knows them; below, it was driven away from them, which tells them too. A sanity check: attacks that know more find more.
    """
    check_predictions(samples=samples, unseen=unseen)
    losses = []
    for argument, predictions in (("samples", samples), ("unseen", unseen)):
        if len(predictions.logits) == 0:
            raise InputError(argument, "must hold at least one sample")
        values = objective.per_sample(predictions.logits.double(), predictions.targets)
        check_numbers("losses", int(values.isnan().sum()), values.numel())
        losses.append(values.flatten())
    return area_under_curve(-losses[0], -losses[1])


def attack_error(samples: int, unseen: int) -> float:
    """The standard deviation of `loss_attack` where nothing tells m samples from n: √((m + n + 1) / 12mn) (Mann and Whitney, 1947)."""
    return float(((samples + unseen + 1) / (12 * samples * unseen)) ** 0.5)


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    """The share of pairs in which the positive value is the larger, equal ones counted half (Mann and Whitney's U)."""
    ordered = negative.sort().values
    below, up_to = (torch.searchsorted(ordered, positive, right=right) for right in (False, True))
    return float((below + up_to).double().mean() / 2 / len(ordered))
