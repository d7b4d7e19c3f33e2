"""Check the form and the values of labels against the outputs of the head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from expunge.errors import InputError

UNEXACT = 0.01  # of a sum of probabilities, which may be rounded to half precision
IGNORED = -100  # the label torch.nn.functional.cross_entropy skips
_known = ContextVar("_known", default=False)


@contextmanager
def known_labels() -> Iterator[None]:
    """Within it labels on a GPU are not looked at again: they were checked before, and to look is to wait for the device."""
    token = _known.set(True)
    try:
        yield
    finally:
        _known.reset(token)


def can_be_looked_at(tensor: Tensor) -> bool:
    """Whether labels may be compared with these outputs: on a GPU not where they are known, nor in a capture, which cannot read values."""
    return not tensor.is_cuda or not (_known.get() or torch.cuda.is_current_stream_capturing())


def as_labels(targets: Tensor) -> Tensor:
    """Integers of any size as int64, which torch's losses take; flags and fractions as they are."""
    integers = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return targets.long() if integers else targets


def has_label(targets: Tensor) -> Tensor:
    """Which targets count: all but the ignored. As int64, since of bytes 156 is −100 to torch."""
    return as_labels(targets) != IGNORED


def check_labels(logits: torch.Size, targets: Tensor, ignored: int | None = None) -> None:
    """Integer labels must name an output of the head (on CUDA the kernel would otherwise abort the process).

    The logits may be of another batch: samples and positions are not compared, which `check_form` does. `ignored` is the label that a
    user's own loss skips.
    """
    if len(logits) < 2 or targets.numel() == 0:
        return
    soft = targets.is_floating_point()
    if targets.is_complex() or targets.dim() != (len(logits) if soft else len(logits) - 1) or (soft and targets.shape[1] != logits[1]):
        raise _bad_form(logits, targets)
    if soft:
        return _check_probabilities(targets)
    _check_inside(logits, targets, (IGNORED if len(logits) > 2 else None, ignored))


def check_form(logits: torch.Size, targets: Tensor) -> None:
    """What cross-entropy takes: logits (N, K, ...) with labels (N, ...), or with probabilities of the logits' own shape."""
    if len(logits) < 2:
        rule = "class logits must be (N, K, ...); give an Objective with other losses and classes=False"
        raise InputError("objective", rule, tuple(logits))
    if targets.shape != (logits if targets.is_floating_point() else logits[:1] + logits[2:]):
        raise _bad_form(logits, targets)


def check_likely_labels(logits: torch.Size, targets: Tensor, ignored: int | None = None) -> None:
    """Where an objective does not say whether its outputs are of classes, integers in the form of labels must be outputs of the head.

    They may not be labels; but on CUDA a cross-entropy under any name would abort the process for one that is outside.
    """
    integers = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if integers and len(logits) > 1 and logits[1] > 1 and targets.dim() == len(logits) - 1:
        advice = ", or Objective(classes=False) says that the outputs are not of classes along dimension 1 (counts, grades)"
        _check_inside(logits, targets, (IGNORED, ignored), advice)


def _check_probabilities(targets: Tensor) -> None:
    """Numbers of a regression, or several labels per sample, have the form of probabilities, too."""
    sums, least = targets.detach().double().sum(1), float(targets.min())
    off = float((sums - 1).abs().max())
    if not (least >= -UNEXACT and off <= UNEXACT):
        rule = "targets that are no labels must be probabilities, from 0 to 1 and 1 in all for each sample"
        advice = "; for anything else give an Objective with other losses and classes=False"
        found = f"{least:.4g}" if least < -UNEXACT else f"a sum of {float(sums.flatten()[(sums - 1).abs().argmax()]):.4g}"
        raise InputError("batches", rule + advice, found)


def _check_inside(logits: torch.Size, targets: Tensor, left_out: tuple[int | None, ...], advice: str = "") -> None:
    labels = targets.long()
    for ignored in left_out:
        labels = labels if ignored is None else labels[labels != ignored]
    if labels.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(labels))
    if low < 0 or high >= logits[1]:
        raise InputError("batches", f"labels must be in [0, {logits[1]}), the outputs of the head{advice}", low if low < 0 else high)


def _bad_form(logits: torch.Size, targets: Tensor) -> InputError:
    labels = f"integer labels of shape ({', '.join(['N', *map(str, logits[2:])])}{',' if len(logits) == 2 else ''})"
    rule = f"targets must be {labels} or probabilities of shape ({', '.join(['N', *map(str, logits[1:])])}), as the logits are"
    return InputError("batches", f"{rule}{form_advice(logits, targets)}", f"{targets.dtype} of shape {tuple(targets.shape)}")


def form_advice(logits: torch.Size, targets: Tensor) -> str:
    """How to make labels of targets in the commonest other forms."""
    if targets.shape == logits and not targets.is_floating_point():
        return " (one-hot labels: give labels.argmax(1))"
    if targets.dim() == len(logits) and targets.shape[1:2] == (1,):
        return " (a column of labels: give labels.squeeze(1)" + (".long())" if targets.is_floating_point() else ")")
    if targets.dim() == len(logits) - 1 and targets.is_floating_point():
        return " (labels as fractions: give labels.long(); for another loss give an Objective)"
    if len(logits) == 3 and targets.shape == logits[:2] and not targets.is_floating_point():
        return " (a label per token: give the objective TOKENS, or NEXT_TOKENS of a causal model, of expunge.data.tokens)"
    return ""
