"""Measure a model on data, its predictions, or a history of epochs, by pure functions."""

from expunge.metrics.accuracy import accuracy, unlearn_score
from expunge.metrics.by_chunks import Measured, by_chunks
from expunge.metrics.comparison import agreement, divergence
from expunge.metrics.epochs import BestEpoch, Stability, best_epoch, fluctuation, stability
from expunge.metrics.membership import attack_error, loss_attack
from expunge.metrics.predictions import (
    Predictions,
    accuracy_of,
    attack_success,
    class_accuracies,
    logits,
    mean_loss,
    predicted_shares,
)
from expunge.metrics.probing import Probe, linear_probes
from expunge.metrics.relearning import RelearnCurve, Relearned, Relearning, relearn_curve, relearn_time

__all__ = [
    "BestEpoch",
    "Measured",
    "Predictions",
    "Probe",
    "RelearnCurve",
    "Relearned",
    "Relearning",
    "Stability",
    "accuracy",
    "accuracy_of",
    "agreement",
    "attack_error",
    "attack_success",
    "best_epoch",
    "by_chunks",
    "class_accuracies",
    "divergence",
    "fluctuation",
    "linear_probes",
    "logits",
    "loss_attack",
    "mean_loss",
    "predicted_shares",
    "relearn_curve",
    "relearn_time",
    "stability",
    "unlearn_score",
]
