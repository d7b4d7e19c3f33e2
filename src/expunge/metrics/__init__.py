"""Measure a model on data, its predictions, or a history of epochs, by pure functions."""

from expunge.metrics.accuracy import accuracy, unlearn_score
from expunge.metrics.attacks import attack_error, loss_attack
from expunge.metrics.comparison import agreement, divergence
from expunge.metrics.epochs import BestEpoch, Stability, best_epoch, fluctuation, stability
from expunge.metrics.predictions import (
    Predictions,
    accuracy_of,
    attack_success,
    class_accuracies,
    logits,
    mean_loss,
    predicted_shares,
)
from expunge.metrics.relearning import Relearned, Relearning, relearn_time

__all__ = [
    "BestEpoch",
    "Predictions",
    "Relearned",
    "Relearning",
    "Stability",
    "accuracy",
    "accuracy_of",
    "agreement",
    "attack_error",
    "attack_success",
    "best_epoch",
    "class_accuracies",
    "divergence",
    "fluctuation",
    "logits",
    "loss_attack",
    "mean_loss",
    "predicted_shares",
    "relearn_time",
    "stability",
    "unlearn_score",
]
