"""Count losses into the same bins for all networks and sets, for pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.audit.findings import Histogram
from expunge.audit.measures import Subject
from expunge.audit.reading import Reading

BINS = 24


def edges_of(*readings: Reading) -> tuple[float, ...]:
    """From 0 to what 99 % of the finite losses on forget are below, evenly in log(1 + loss)."""
    losses = torch.cat([part.losses for reading in readings for part in reading.parts.values()])
    finite = losses[torch.isfinite(losses)]
    top = max(float(finite.quantile(0.99)) if len(finite) < 10**6 else float(finite.max()), 1e-3)
    forget = torch.cat([reading["forget"].losses for reading in readings])
    forget = forget[torch.isfinite(forget)]
    top = max(top, float(forget.max()) if len(forget) else 0.0)
    steps = torch.linspace(0, float(torch.tensor(top).log1p()), BINS + 1, dtype=torch.float64)
    return tuple(steps.expm1().tolist())


def histograms(reading: Reading, subject: Subject, edges: tuple[float, ...]) -> dict[str, Histogram]:
    """Of forget, of remain, and of unseen samples like the forgotten ("held-out")."""
    test = reading["test"]
    sets = {"forget": reading["forget"].losses, "remain": reading["remain"].losses, "held-out": test.losses[subject.like(test)]}
    return {name: Histogram(edges, tuple(_counts(losses, edges))) for name, losses in sets.items()}


def _counts(losses: Tensor, edges: tuple[float, ...]) -> list[int]:
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    return torch.bincount(torch.bucketize(losses, inner, right=True), minlength=len(edges) - 1).tolist()
