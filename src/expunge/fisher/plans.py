"""Plan the computation of a Fisher information without doing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from expunge.data.batches import batch_size, device_of, to_device
from expunge.data.objective import Batch, Objective, batch_targets, check_objective
from expunge.errors import InputError
from expunge.fisher.borrowing import undisturbed, wanted_parameters
from expunge.fisher.planning.description import FisherPlan, described
from expunge.fisher.planning.survey import survey
from expunge.model.checks import check_batch
from expunge.model.copying import unwrapped


def plan(model: nn.Module, batch: Batch, *, objective: Objective | None = None, parameters: Iterable[str] | None = None) -> FisherPlan:
    """Which parameter `fisher.diagonal` computes how, from the first two samples of a batch of at least two.

    By closed form: in the one forward and backward pass. By torch.func: in a second such pass, under vmap. In a loop: in a pass per
    sample. Idle: these samples do not use it. `parameters` as in `fisher.diagonal`. The model is left as it was.
    """
    objective = Objective() if objective is None else objective
    check_objective(objective)
    model = unwrapped(model)
    chosen = wanted_parameters(model, parameters)
    _check_one(batch, objective)
    check_batch(batch, "batch", objective)
    if batch_size(batch) < 2:
        raise InputError("batch", "must hold at least two samples", batch_size(batch))
    with undisturbed(model, chosen):
        return described(survey(model, chosen, to_device(batch, device_of(model)), objective), list(chosen))


def _check_one(batch: Any, objective: Objective) -> None:
    """`fisher.diagonal` takes several. With targets of your own a list of structures may be one batch."""
    listed = isinstance(batch, list) and objective.targets is batch_targets
    if isinstance(batch, (Dataset, DataLoader)) or (listed and batch and all(isinstance(entry, (tuple, list, Mapping)) for entry in batch)):
        rule = "must be one batch: next(iter(loader)) of a loader, next(iter(DataLoader(dataset, 8))) of a dataset, batches[0] of a list"
        raise InputError("batch", rule, type(batch).__name__)
