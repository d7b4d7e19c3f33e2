"""Say how each parameter's Fisher information is computed, why, and at which share of the work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from expunge.errors import InputError, SlowFisherWarning
from expunge.fisher.planning.plan import Plan
from expunge.runtime.callers import level_of_caller
from expunge.runtime.display import counted, html_table, text_table

CLOSED, FUNC, LOOP, IDLE = "closed form", "torch.func", "loop", "idle"
COSTS = {FUNC: "a second forward and backward pass, under vmap", LOOP: "a forward and backward pass per sample"}
LIMIT = 0.1  # of the work; beyond, by loops or torch.func, a call warns


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: the way, the operations it is used in, why there is no closed form (else ""), and the share of the work.

    `share`: the multiplications behind its gradient, entries of the outputs times terms of each, of those of all parameters.
    """

    name: str
    way: str  # "closed form", "torch.func", "loop" or "idle"
    operations: str
    reason: str
    share: float


@dataclass(frozen=True)
class FisherPlan:
    """How `fisher.diagonal` begins on data like this batch: later batches may move parameters to a loop, where they do not confirm it."""

    parameters: tuple[ParameterPlan, ...]

    def __getitem__(self, name: str) -> ParameterPlan:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise InputError("name", "must be one of the plan's parameters", name)

    def named(self, way: str) -> list[str]:
        """The parameters that are computed in this way."""
        return [parameter.name for parameter in self.parameters if parameter.way == way]

    @property
    def slow(self) -> float:
        """The share of the work of a call that is done by torch.func and in loops.

        Each of the three ways that any parameter needs runs the whole model once over every sample, however few the parameters are.
        """
        needed = [way for way in (CLOSED, FUNC, LOOP) if self.named(way)]
        return sum(way != CLOSED for way in needed) / max(1, len(needed))

    def __repr__(self) -> str:
        ways = [f"{len(self.named(way))} {way}" for way in (CLOSED, FUNC, LOOP, IDLE) if self.named(way)]
        return f"FisherPlan({counted(len(self.parameters), 'parameter')}: {', '.join(ways)})"

    def __str__(self) -> str:
        return text_table(repr(self), self._rows())

    def _repr_html_(self) -> str:
        return html_table(repr(self), self._rows())

    def _rows(self) -> list[Sequence[str]]:
        """Parameters without a closed form one by one, the others by their operations."""
        groups: dict[tuple[str, ...], list[ParameterPlan]] = {}
        for one in self.parameters:
            key: tuple[str, ...] = (f"closed form: {one.operations}",) if one.way == CLOSED else (one.way, one.name)
            groups.setdefault(key, []).append(one)
        rows: list[Sequence[str]] = [("way", "parameters", "share of work", "why")]
        for key, ones in sorted(groups.items(), key=lambda item: -sum(one.share for one in item[1])):
            what = counted(len(ones), "parameter") if ones[0].way == CLOSED else ones[0].name
            rows.append((key[0], what, f"{sum(one.share for one in ones):.1%}", ones[0].reason))
        return rows


def described(chosen: Plan, names: Sequence[str]) -> FisherPlan:
    ways = {name: way for way, some in ((CLOSED, chosen.layouts), (FUNC, chosen.batched), (LOOP, chosen.looped)) for name in some}
    total = max(1, sum(chosen.work.get(name, 0) for name in names))
    return FisherPlan(
        tuple(
            ParameterPlan(
                name, ways.get(name, IDLE), chosen.ways.get(name, ""), chosen.reasons.get(name, ""), chosen.work.get(name, 0) / total
            )
            for name in names
        )
    )


def warn_if_slow(chosen: Plan, names: Sequence[str]) -> bool:
    """Warn where more than a tenth of the work of a call falls to loops or to torch.func."""
    found = described(chosen, names)
    if found.slow <= LIMIT:
        return False
    slow = [one for one in found.parameters if one.way in COSTS]
    costs = " and ".join(COSTS[way] for way in COSTS if found.named(way))
    first = f"{slow[0].name}: {slow[0].reason}" if slow[0].reason else slow[0].name
    text = (
        f"{counted(len(slow), 'parameter')} of {len(names)} without a closed form ({first}) take {costs}; fisher.plan(model, batch) tells"
    )
    warnings.warn(text, SlowFisherWarning, stacklevel=level_of_caller())
    return True
