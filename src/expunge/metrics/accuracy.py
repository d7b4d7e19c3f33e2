"""Measure accuracy, and combine two accuracies into the paper's unlearn score."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.labels import as_labels, check_labels, form_advice, has_label
from expunge.data.objective import Objective, check_objective
from expunge.errors import DivergedError, InputError, naming
from expunge.model.checks import check_batch, check_module
from expunge.runtime.modes import in_mode, seeded, unchanged
from expunge.validate import check_number, check_whole


def accuracy(model: nn.Module, data: Data, objective: Objective = Objective(), batch_size: int = 128) -> float:
    """The fraction of labels that are the largest logit, in eval mode.

    Logits may be (N, K) or (N, K, positions...). The model's modes and all random states are restored. NaN among the logits of a label
    that counts raises `DivergedError`: it is no answer, neither right nor wrong.
    """
    right, labels = tally(model, data, objective, batch_size)
    return right / labels


def tally(model: nn.Module, data: Data, objective: Objective = Objective(), batch_size: int = 128) -> tuple[int, int]:
    """The number of labels that are the largest logit, and that of all labels; see `accuracy`."""
    check_module(model)
    check_objective(objective)
    check_whole("batch_size", batch_size, minimum=1)
    batch_size = int(batch_size)
    device = device_of(model)
    right = torch.zeros((), dtype=torch.int64, device=device)
    counted = torch.zeros((), dtype=torch.int64, device=device)
    broken = torch.zeros((), dtype=torch.int64, device=device)
    # Not inference mode: a tensor that the model keeps for later could not be trained with.
    with naming("data"), seeded(0, device), in_mode(model, training=False), unchanged(model), torch.no_grad():
        for number, batch in enumerate(as_batches(data, "data", batch_size)):
            batch = to_device(batch, device)
            logits, targets = objective.logits(model, batch), as_labels(objective.targets(batch))
            check_targets(logits, targets)
            if number == 0:
                check_classes(objective, logits.shape, "accuracy needs")
            valid = has_label(targets)
            largest, predicted = logits.max(1)
            right += ((predicted == targets) & valid).sum()
            counted += valid.sum()
            broken += (largest.isnan() & valid).sum()
    if int(counted) == 0:
        raise InputError("data", "must hold at least one label")
    if int(broken):
        for batch in as_batches(data, "data", batch_size):
            check_batch(batch, "data", objective)  # NaN may come from the data
    check_numbers("the logits", int(broken), int(counted))
    return int(right), int(counted)


def check_targets(logits: Tensor, targets: Tensor) -> None:
    """Require one label of the head per row of logits and position."""
    if logits.dim() < 2 or logits.shape[1] < 2:
        rule = "must be (N, K) or (N, K, positions...), a number for each of K classes, two or more"
        raise InputError("logits", rule, f"shape {tuple(logits.shape)}")
    if targets.is_floating_point() or targets.shape != logits.shape[:1] + logits.shape[2:]:
        form = f"{targets.dtype} {tuple(targets.shape)} for logits {tuple(logits.shape)}"
        raise InputError("data", f"accuracy needs one integer label for each row of logits{form_advice(logits.shape, targets)}", form)
    check_labels(logits.shape, targets)


def check_numbers(what: str, broken: int, counted: int) -> None:
    """Raise where a model's outputs are NaN: it has diverged, and an accuracy would hide that, since NaN counts as largest."""
    if broken:
        raise DivergedError(f"{what} are NaN in {broken} of {counted} rows: the model diverged, nothing was measured")


def unlearn_score(remain_accuracy: float, forget_accuracy: float) -> float:
    """remain / (1 + forget), both as fractions: 1 if and only if all is kept and nothing is left (section Evaluation)."""
    for argument, value in (("remain_accuracy", remain_accuracy), ("forget_accuracy", forget_accuracy)):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        check_number(argument, number, 0, 1, ends="[]", rule="must be a fraction in [0, 1]")
    return remain_accuracy / (1 + forget_accuracy)
