"""Confirm on the CPU as on a GPU, without waiting: there fewer samples are drawn, and comparisons are read behind the batches.

Kept failures carry the text of this file.
"""

from __future__ import annotations

from typing import Any

from expunge.fisher import adders
from expunge.fisher.queueing import QueuedConfirmation


def as_on_cuda(place: Any, *given: Any) -> QueuedConfirmation:
    confirmation = QueuedConfirmation(*given)
    confirmation._on_cuda = True
    return confirmation


def confirm_as_on_cuda() -> None:
    """In this process, from now on."""
    adders._confirmation = as_on_cuda  # type: ignore[assignment]
