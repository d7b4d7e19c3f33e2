"""Measure what a request did to the model: by accuracies where samples have labels, else by mean losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from expunge import metrics
from expunge.data.batches import Data, as_batches
from expunge.errors import InputError
from expunge.methods import Choose, Method
from expunge.requests.task import Task
from expunge.unlearning import check_watched

DOCS = "see docs/losses.md for what needs no more than a loss"


@dataclass(frozen=True)
class MeanLoss:
    """Of some samples, before and after a request."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.before:.4g} -> {self.after:.4g}"


def has_labels(task: Task) -> bool:
    """Whether accuracies can be measured: the outputs are class logits, and the targets whole numbers."""
    if not task.objective.of_classes:
        return False
    targets = task.objective.targets(next(iter(as_batches(task.test, "test", 1))))
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def check_measurable(method: Method, task: Task) -> None:
    """Raise where a method is to be chosen by accuracies that cannot be measured."""
    if isinstance(method, Choose) and not has_labels(task):
        rule = f"must be named, such as fisher-mask: to choose one needs class logits and labels; {DOCS}"
        raise InputError("method", rule, "an objective() or targets without classes")


def check_fitting(method: Method, task: Task, model: nn.Module, forget: Data, batch_size: int) -> None:
    """Raise where the model does not take the data that will be measured, or their labels are not of its classes.

    The samples to forget are those of train().
    """
    if not has_labels(task):
        return
    data = {"train": forget, "test": task.test} | ({"validation": task.validation} if getattr(method, "takes_validation", False) else {})
    for name, samples in data.items():
        if samples is not None:
            check_watched(model, as_batches(samples, f"{name}()", batch_size), f"{name}()", task.objective, advice="")


def mean_losses(task: Task, before: nn.Module, after: nn.Module, data: Mapping[str, Data], batch_size: int) -> dict[str, MeanLoss]:
    """The mean loss over each of the data, by both models."""

    def loss(model: nn.Module, samples: Data) -> float:
        return metrics.mean_loss(metrics.logits(model, samples, task.objective, batch_size), task.objective)

    return {name: MeanLoss(loss(before, samples), loss(after, samples)) for name, samples in data.items()}
