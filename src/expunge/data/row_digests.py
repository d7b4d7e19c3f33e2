"""Identify data that show no tensors by some of their samples, as they are read, so that another order of them is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from expunge.data.batches import as_batches
from expunge.data.digest import add_batch
from expunge.data.objective import Batch
from expunge.data.parting import Cuttable
from expunge.runtime.modes import seeded

SPREAD = 64  # rows that are read


def row_digest(rows: Cuttable, targets: Callable[[Batch], Any], argument: str) -> str | None:
    """SHA-256 over 64 samples spread over the data, with their number; of their targets alone where reading twice gives other samples
    (random transforms that no seed reaches), and None where it gives other targets too."""
    once, again = (_read(rows, targets, argument) for _ in range(2))
    for what, (first, second) in enumerate(zip(once, again, strict=True)):
        if first == second:
            return f"{('rows', 'targets')[what]} {first}"
    return None


def is_of_rows(digest: str) -> bool:
    """Whether a digest is of samples that were read, and not of tensors."""
    return " " in digest


def _read(rows: Cuttable, targets: Callable[[Batch], Any], argument: str) -> tuple[str, str]:
    numbers = torch.linspace(0, rows.samples - 1, min(SPREAD, rows.samples), dtype=torch.float64).round().long().unique()
    digests = [hashlib.sha256(f"{rows.samples}|".encode()) for _ in range(2)]
    with seeded(0, torch.device("cpu")):
        for batch in as_batches(rows.at(numbers, True), argument):
            add_batch(digests[0], batch)
            add_batch(digests[1], targets(batch))
    return digests[0].hexdigest(), digests[1].hexdigest()
