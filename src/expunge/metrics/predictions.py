"""Compute a model's predictions on data once, and the measures that need nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, as_batches, device_of, to_device
from expunge.data.labels import as_labels, has_label
from expunge.data.objective import Objective, check_objective
from expunge.errors import InputError, naming
from expunge.metrics.accuracy import check_numbers, check_targets
from expunge.model.checks import check_module
from expunge.runtime.modes import in_mode, seeded, unchanged
from expunge.validate import check_whole


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits (N, K) or (N, K, positions...) and targets of the same samples, in the order of the data.

    Every measure of them raises `DivergedError` where logits it needs are NaN: the model has diverged.
    """

    logits: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.logits.dim() == 0 or self.targets.dim() == 0:
            raise InputError("logits" if self.logits.dim() == 0 else "targets", "must have a row for each sample", "a single number")
        if len(self.logits) != len(self.targets):
            raise InputError("targets", f"must be as many as the {len(self.logits)} rows of logits", len(self.targets))

    @cached_property
    def counted(self) -> Tensor:
        """Which targets count: all but the ignored."""
        check_targets(self.logits, self.targets)
        counted = has_label(self.targets)
        if not counted.any():
            raise InputError("data", "must hold at least one label")
        return counted

    @cached_property
    def labels(self) -> Tensor:
        """The targets that count, flat."""
        return self.targets[self.counted]

    @cached_property
    def predicted(self) -> Tensor:
        """The class of the largest logit for each of `labels`."""
        counted = self.counted
        largest, predicted = (column[counted] for column in self.logits.max(1))
        check_numbers("the logits", int(largest.isnan().sum()), largest.numel())
        return predicted


def logits(
    model: nn.Module, data: Data, objective: Objective = Objective(), batch_size: int = 128, device: torch.device | str = "cpu"
) -> Predictions:
    """The model's logits on data, in eval mode, kept on `device` in float32 (float64 where the model's are).

    A loader that shuffles gives another order each time: pass a dataset to compare two models. The model's modes and all random states are
    restored.
    """
    check_module(model)
    check_objective(objective)
    check_whole("batch_size", batch_size, minimum=1)
    home = device_of(model)
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    with naming("data"), seeded(0, home), in_mode(model, training=False), unchanged(model), torch.no_grad():
        for batch in as_batches(data, "data", int(batch_size)):
            batch = to_device(batch, home)
            outputs = objective.logits(model, batch)
            rows.append(outputs if outputs.dtype == torch.float64 else outputs.float())
            targets.append(as_labels(objective.targets(batch)))
    shapes = {tuple(outputs.shape[1:]) for outputs in rows}
    if len(shapes) > 1:
        raise InputError("data", "logits of all samples must have one shape", sorted(shapes))
    # Moved at the end and not batch by batch: a GPU need not wait.
    return Predictions(torch.cat(rows).to(device), torch.cat(targets).to(device))


def check_predictions(**arguments: Any) -> None:
    """A model or its data alone are given by mistake."""
    for argument, value in arguments.items():
        if not isinstance(value, Predictions):
            raise InputError(argument, "must be a model's predictions, metrics.logits(model, data)", f"a {type(value).__name__}")


def accuracy_of(predictions: Predictions) -> float:
    """The fraction of labels that are the largest logit."""
    check_predictions(predictions=predictions)
    return _share(predictions.predicted == predictions.labels)


def class_accuracies(predictions: Predictions) -> dict[int, float]:
    """The accuracy on the samples of each label that occurs."""
    check_predictions(predictions=predictions)
    right = predictions.predicted == predictions.labels
    return {label: _share(right[predictions.labels == label]) for label in torch.unique(predictions.labels).tolist()}


def predicted_shares(predictions: Predictions) -> dict[int, float]:
    """The fraction of samples predicted as each class, whatever their label."""
    check_predictions(predictions=predictions)
    counts = torch.bincount(predictions.predicted, minlength=predictions.logits.shape[1])
    return {label: count / int(counts.sum()) for label, count in enumerate(counts.tolist())}


def attack_success(predictions: Predictions) -> float:
    """The fraction of triggered images predicted as the attacker's label, which the "attack" data of a poisoned scenario all carry."""
    check_predictions(predictions=predictions)
    labels = torch.unique(predictions.labels).tolist()
    if len(labels) != 1:
        raise InputError("predictions", "must be on triggered images that all carry the attacker's label", f"labels {labels}")
    return accuracy_of(predictions)


def mean_loss(predictions: Predictions, objective: Objective = Objective()) -> float:
    """The mean of the objective's loss per sample, in float64."""
    check_predictions(predictions=predictions)
    if len(predictions.logits) == 0:
        raise InputError("predictions", "must hold at least one sample")
    if objective.of_classes and predictions.logits.dim() < 2:
        raise InputError("logits", "must be (N, K) or (N, K, positions...) for this loss", f"shape {tuple(predictions.logits.shape)}")
    losses = objective.per_sample(predictions.logits.double(), predictions.targets)
    check_numbers("losses", int(losses.isnan().sum()), losses.numel())
    return float(losses.mean())


def _share(right: Tensor) -> float:
    return int(right.sum()) / right.numel()
