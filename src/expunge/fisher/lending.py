"""Lend one plan to many passes of the same model: planning takes as long as a pass over some thirty samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import nn

from expunge.data.batches import Data, as_batches, batch_size, device_of, to_device
from expunge.data.objective import Objective
from expunge.fisher.borrowing import undisturbed
from expunge.fisher.planning.definition import PROBE
from expunge.fisher.planning.plan import Plan
from expunge.fisher.planning.survey import survey
from expunge.model.checks import check_batch


class UnfitError(Exception):
    """A lent plan would have to be changed for these data."""


@dataclass
class LentPlan(Plan):
    """A plan that stays as it is, whichever passes use it, so that none depends on those before: where it does not hold, it raises."""

    def revise(self, names: set[str]) -> None:
        raise UnfitError(names)


def lent_plan(model: nn.Module, parameters: Mapping[str, nn.Parameter], data: Data, objective: Objective) -> LentPlan | None:
    """The plan that the first batch of these data gives; None where that is a single sample, which needs none."""
    with undisturbed(model, parameters):
        batch = next(iter(as_batches(data, "data", PROBE)))
        check_batch(batch, "data", objective)
        if batch_size(batch) < PROBE:
            return None
        plan = survey(model, parameters, to_device(batch, device_of(model)), objective)
        return LentPlan(**{each.name: getattr(plan, each.name) for each in fields(plan)})
