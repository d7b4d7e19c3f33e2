"""Name the settings and the data that identify a training, for its files to be compared with."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from expunge.data.digest import data_digest
from expunge.training import checkpoints
from expunge.training.optimizers import rate_at
from expunge.training.tuning import Tuning

HOW = ("params", "lr", "foreach", "fused", "capturable", "differentiable")  # of an optimizer: set by the loop, or for speed alone


def settings_of(
    tuning: Tuning, optimizer: Optimizer, plan: Sequence[Sequence[Any]], digest: Callable[[Any], str | None] = data_digest
) -> dict[str, str]:
    """By name. The schedule by its rates, the optimizer by its groups: their names may not say enough. `plan` are the phases by epoch."""
    steps = [sum(len(phase.batches) for phase in parts) for parts in plan]
    rates = [[rate_at(tuning, epoch + step / count) for step in range(count)] for epoch, count in enumerate(steps)]
    runs = ", ".join(f"{len(list(equal))}x{rate:g}" for rate, equal in itertools.groupby(of_epoch[0] for of_epoch in rates))
    of_rates = hashlib.sha256(repr(rates).encode()).hexdigest()[:8]
    groups = [{name: value for name, value in group.items() if name not in HOW} for group in optimizer.param_groups]
    return {
        "steps": str(sum(steps)),
        "rates": f"{runs} by epoch ({of_rates})",
        "optimizer": f"{type(optimizer).__name__} {groups}",
        **{name: str(getattr(tuning, name)) for name in ("batch_size", "freeze", "seed", "eval_mode", "precision")},
        **_data(plan, digest),
    }


def _data(plan: Sequence[Sequence[Any]], digest: Callable[[Any], str | None]) -> dict[str, str]:
    """The digests of the data, where all have one."""
    sources = {id(phase.batches.source): phase.batches.source for parts in plan for phase in parts}
    digests = [digest(source) for source in sources.values()]
    return {} if None in digests else {checkpoints.DATA: " ".join(map(str, digests))}
