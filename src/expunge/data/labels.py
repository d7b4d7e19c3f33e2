"""Whether targets are labels that a head has: their form, their values, and what a loss of one's own makes of others."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.runtime.modes import seeded

IGNORED = -100  # the label torch.nn.functional.cross_entropy leaves out
ASKED = 32  # values of a batch, outside the head, that a loss is asked about
Losses = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> one loss a sample
_TAKEN: WeakKeyDictionary[Losses, set[tuple[torch.Size, int]]] = WeakKeyDictionary()


def as_labels(targets: Tensor) -> Tensor:
    """Integers of any size as int64, which torch's losses take; flags and fractions as they are."""
    integers = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return targets.long() if integers else targets


def check_labels(logits: torch.Size, targets: Tensor) -> None:
    """Integer labels must name an output of the head (on CUDA the kernel would otherwise abort the process).

    The logits may be of another batch: samples and positions are not compared, which `check_form` does.
    """
    if len(logits) < 2 or targets.numel() == 0:
        return
    soft = targets.is_floating_point()
    if targets.is_complex() or targets.dim() != (len(logits) if soft else len(logits) - 1) or (soft and targets.shape[1] != logits[1]):
        raise _bad_form(logits, targets)
    if soft:
        return
    labels = targets.long()
    counted = labels[labels != IGNORED] if len(logits) > 2 else labels
    if counted.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(counted))
    if low < 0 or high >= logits[1]:
        raise _not_of_head(logits, low if low < 0 else high)


def check_form(logits: torch.Size, targets: Tensor) -> None:
    """What cross-entropy takes: logits (N, K, ...) with labels (N, ...), or with probabilities of the logits' own shape."""
    if len(logits) < 2:
        raise InputError("objective", "cross-entropy needs logits of shape (N, K, ...); give an Objective with other losses", tuple(logits))
    if targets.shape != (logits if targets.is_floating_point() else logits[:1] + logits[2:]):
        raise _bad_form(logits, targets)


def check_taken(losses: Losses, logits: torch.Size, targets: Tensor) -> None:
    """Integers outside the head's outputs must be ones that these losses take.

    They may leave some out, by an ignore_index of their own, or the targets may be no labels at all: counts, ordinal numbers. So they are
    asked about each such integer, once: on the CPU a cross-entropy, whatever its name, raises for a label that the head does not have.
    On CUDA it would abort the process.
    """
    if not isinstance(targets, Tensor) or targets.dim() == 0 or targets.numel() == 0 or len(logits) < 2 or logits[1] < 2:
        return
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return
    low, high = (int(value) for value in torch.aminmax(as_labels(targets)))
    if low >= 0 and high < logits[1]:
        return
    rows = as_labels(targets.detach()).cpu()
    outside = (rows < 0) | (rows >= logits[1])
    values, taken = rows[outside].unique().tolist(), _taken_by(losses)
    for value in values if len(values) <= ASKED else [*values[: ASKED // 2], *values[-ASKED // 2 :]]:
        if (logits[1:], value) in taken:
            continue
        place = int((rows == value).reshape(len(rows), -1).any(1).int().argmax())
        inside = rows[place].masked_fill(outside[place], 0)
        with_value = torch.where(rows[place] == value, value, inside)
        if not _takes(losses, logits, with_value) and _takes(losses, logits, inside):  # else it cannot be asked by itself
            raise _not_of_head(logits, value)
        taken.add((logits[1:], value))


def _taken_by(losses: Losses) -> set[tuple[torch.Size, int]]:
    """What these losses are known to take; forgotten with them."""
    try:
        return _TAKEN.setdefault(losses, set())
    except TypeError:  # one that has no hash, or cannot be referred to weakly
        return set()


def _takes(losses: Losses, logits: torch.Size, row: Tensor) -> bool:
    """Whether the losses can be computed for a sample with these targets, which a second one shares.

    Positions may be others than in the batch of the logits, and the classes last; the type of the logits is not known either. Nothing
    that is drawn or held on a device is changed.
    """
    alone = _copied(losses) if isinstance(losses, nn.Module) else losses
    forms = dict.fromkeys([tuple(logits[1:]), (logits[1], *row.shape), (*row.shape, logits[-1])])
    for form, dtype in itertools.product(forms, (torch.float32, torch.float64, torch.bfloat16)):
        try:
            with seeded(0, torch.device("cpu")), torch.inference_mode(False), torch.enable_grad():
                alone(torch.zeros(2, *form, dtype=dtype, requires_grad=True).clone(), torch.stack([row, row]))
        except Exception:  # whatever a loss of somebody's raises
            continue
        return True
    return False


def _copied(losses: nn.Module) -> nn.Module:
    """On the CPU; what a loss keeps from call to call stays as it is."""
    try:
        return copy.deepcopy(losses).cpu()
    except Exception:  # what cannot be copied is asked itself
        return losses


def _not_of_head(logits: torch.Size, label: int) -> InputError:
    return InputError("batches", f"labels must be in [0, {logits[1]}), the outputs of the head", label)


def _bad_form(logits: torch.Size, targets: Tensor) -> InputError:
    labels = f"integer labels of shape ({', '.join(['N', *map(str, logits[2:])])}{',' if len(logits) == 2 else ''})"
    rule = f"targets must be {labels} or probabilities of shape ({', '.join(['N', *map(str, logits[1:])])}), as the logits are"
    return InputError("batches", f"{rule}{form_advice(logits, targets)}", f"{targets.dtype} of shape {tuple(targets.shape)}")


def form_advice(logits: torch.Size, targets: Tensor) -> str:
    """What would make labels of targets in one of the commonest other forms."""
    if targets.shape == logits and not targets.is_floating_point():
        return " (one-hot labels: give labels.argmax(1))"
    if targets.dim() == len(logits) and targets.shape[1:2] == (1,):
        return " (a column of labels: give labels.squeeze(1)" + (".long())" if targets.is_floating_point() else ")")
    if targets.dim() == len(logits) - 1 and targets.is_floating_point():
        return " (labels as fractions: give labels.long(); for another loss give an Objective)"
    return ""
