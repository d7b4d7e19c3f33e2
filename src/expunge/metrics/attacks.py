"""Tell samples that a network was trained on from others by their losses."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.errors import InputError


def loss_attack(seen: Tensor, unseen: Tensor) -> float:
    """P(loss of a seen sample < that of an unseen one), ties by half: the area under the curve of an attack that reads losses alone.

    0.5: nothing tells them apart; above: those seen are easier to the network.
    """
    _check(seen, "seen")
    _check(unseen, "unseen")
    ordered = unseen.double().sort().values
    losses = seen.double()
    below, up_to = (torch.searchsorted(ordered, losses, right=right) for right in (False, True))
    doubled = int((2 * len(ordered) - up_to - below).sum())  # 2 for each unseen loss that is larger, 1 for a tie
    return doubled / (2 * len(losses) * len(ordered))


def attack_error(seen: int, unseen: int) -> float:
    """The standard deviation of `loss_attack` where nothing tells m samples from n: √((m + n + 1) / 12mn) (Mann and Whitney, 1947)."""
    return float(((seen + unseen + 1) / (12 * seen * unseen)) ** 0.5)


def _check(losses: Tensor, argument: str) -> None:
    if losses.dim() != 1 or not len(losses):
        raise InputError(argument, "must be one loss per sample, of one sample or more", f"shape {tuple(losses.shape)}")
    if losses.isnan().any():
        raise InputError(argument, "must not be NaN")
