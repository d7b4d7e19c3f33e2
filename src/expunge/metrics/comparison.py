"""Compare a model's predictions with the retrained network's."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.errors import InputError, MismatchError
from expunge.metrics.accuracy import check_numbers
from expunge.metrics.predictions import Predictions, check_predictions


def agreement(model: Predictions, retrained: Predictions) -> float:
    """The fraction of samples both networks give the same class, right or wrong."""
    _check_same_data(model, retrained)
    same = model.predicted == retrained.predicted
    return int(same.sum()) / same.numel()


def divergence(model: Predictions, retrained: Predictions) -> float:
    """Mean KL(retrained ‖ model) = mean over samples of Σ_k r_k (log r_k − log p_k), in nats: 0 where both are equal, else above.

    r and p are the softmax of the retrained and of the model's logits, in float64. The retrained network's distribution comes first: a
    model that gives no probability to a class the retrained one prefers is penalised most.
    """
    _check_same_data(model, retrained)
    first, second = _log_shares(retrained, "the retrained network's"), _log_shares(model, "the model's")
    terms = torch.where(first == -torch.inf, 0.0, first.exp() * (first - second))  # r log r is 0 at r = 0
    return float(terms.sum(-1).mean())


def _log_shares(predictions: Predictions, whose: str) -> Tensor:
    counted = predictions.counted
    log_shares = torch.log_softmax(predictions.logits.double(), dim=1).movedim(1, -1)[counted]
    check_numbers(f"{whose} probabilities", int(log_shares.isnan().any(-1).sum()), len(log_shares))
    return log_shares


def _check_same_data(model: Predictions, retrained: Predictions) -> None:
    check_predictions(model=model, retrained=retrained)
    if model.logits.shape != retrained.logits.shape:
        raise MismatchError(
            f"predictions: must be on the same data; found logits {tuple(model.logits.shape)}, {tuple(retrained.logits.shape)}"
        )
    if not torch.equal(model.targets, retrained.targets):
        raise MismatchError("predictions: must be on the same data in the same order; found other targets")
    if model.logits.device != retrained.logits.device:
        raise InputError("retrained", f"must be on the same device, {model.logits.device}", retrained.logits.device)
