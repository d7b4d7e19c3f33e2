"""Build the optimizer of a training, and read the rate of its schedule; both may be the user's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from expunge.errors import InputError
from expunge.training.tuning import Tuning
from expunge.validate import check_number


def _checked(optimizer: Optimizer, trainable: list[nn.Parameter]) -> Optimizer:
    """Require these parameters: an optimizer of others (say, of the model that `unlearn` copied) would train those, or nothing."""
    rule = "must build a torch optimizer from the parameters it is given, and no others"
    if not isinstance(optimizer, Optimizer):
        raise InputError("optimizer", rule, type(optimizer).__name__)
    strange = {parameter for group in optimizer.param_groups for parameter in group["params"]} - {*trainable}
    if strange:
        raise InputError("optimizer", rule, f"{len(strange)} others")
    return optimizer


def rate_at(tuning: Tuning, time: float) -> float:
    """The schedule's rate, checked: the schedule may be a user's own."""
    rate = tuning.schedule.rate(time)
    rate = rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate
    check_number("schedule", rate, 0, rule=f"must give a finite rate of at least 0 at every time, and so at {time:g}")
    return float(rate)


def build_optimizer(trainable: list[nn.Parameter], tuning: Tuning) -> Optimizer:
    if tuning.optimizer is not None:
        return _checked(tuning.optimizer(trainable), trainable)
    rate: float | Tensor = rate_at(tuning, 0)
    fused = all(parameter.is_cuda for parameter in trainable)
    if fused:
        rate = torch.tensor(rate, device=trainable[0].device)  # there it can change between runs of a CUDA graph
    return SGD(trainable, lr=rate, momentum=tuning.momentum, weight_decay=tuning.weight_decay, fused=fused or None)
