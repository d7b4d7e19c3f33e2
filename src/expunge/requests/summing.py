"""Compute Fisher sums of any rows in one fixed order, so that the same rows have the same sums, to the bit.

F(S) is folded group by group, within a group chunk by chunk of its rows in rising order, as `fisher.by_group` does it. All chunks are
planned on rows 0 and 1 of the task, whichever rows are summed. What was asked for before, and in which order, does not enter, nor does the
number of processes. A total T from which F(A) was taken is kept as two numbers whose sum is exactly T − F(A): with F(A) at hand T comes
back to the bit, without it nobody can tell T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expunge.data.chunks import BATCHES
from expunge.fisher import FisherSums
from expunge.fisher.chunks import Pass
from expunge.fisher.planning.definition import PROBE
from expunge.requests.grouping import Grouping
from expunge.requests.task import Task


@dataclass(frozen=True, eq=False)
class Summing:
    """How to sum: the model, the data of the task, the kind of Fisher information. On a CPU sums are the same to the bit for one number of
    `threads`."""

    task: Task
    model: nn.Module
    kind: str
    batch_size: int
    threads: int = 1

    def over(self, rows: Sequence[int], grouping: Grouping) -> Pass:
        """The pass over these rows; of every group those that are among them."""
        rising = torch.tensor(sorted(rows), dtype=torch.int64)
        data, groups = self.task.rows.at(rising, True), grouping.group[rising]
        return Pass(
            self.model,
            data,
            groups,
            self.kind,
            self.task.objective,
            batch_size=self.batch_size,
            batches_per_chunk=BATCHES,
            threads=self.threads,
            probe=self.task.rows.at(torch.arange(PROBE), True),
        )

    def by_group(self, rows: Sequence[int], grouping: Grouping) -> dict[int, FisherSums]:
        """Σ over these rows, by group, by this process alone."""
        return {int(group): sums for group, sums in self.over(rows, grouping).alone(progress=False).items()} if rows else {}


def folded(parts: Iterable[FisherSums]) -> FisherSums:
    """The sum of all parts in their order."""
    return FisherSums.merge(parts)


@dataclass(frozen=True, eq=False)
class Rest:
    """Sums without some of their samples, exactly: `high` + `low`, each float64, is the difference; `count` the samples left."""

    high: dict[str, Tensor]
    low: dict[str, Tensor]
    count: int

    @classmethod
    def whole(cls, sums: FisherSums) -> Rest:
        return cls(sums.sums, {name: torch.zeros_like(total) for name, total in sums.sums.items()}, sums.count)

    @classmethod
    def without(cls, sums: FisherSums, part: FisherSums) -> Rest:
        """high = fl(T − F), low = the rounding error of that, which is a float64 too (Knuth's two-sum)."""
        pairs = {name: _two_sum(total, -part.sums[name]) for name, total in sums.sums.items()}
        return cls(
            {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}, sums.count - part.count
        )

    def plus(self, part: FisherSums | None, like: FisherSums) -> FisherSums:
        """T again: fl((T − F) + F) is T, since T is a float64."""
        if part is None:
            return replace(like, sums=self.high, count=self.count)
        whole = {}
        for name, high in self.high.items():
            total, error = _two_sum(high, part.sums[name])
            whole[name] = total + (error + self.low[name])
        return replace(like, sums=whole, count=self.count + part.count)


def _two_sum(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """s = fl(a + b) and e with a + b = s + e exactly."""
    total = first + second
    back = total - first
    return total, (first - (total - back)) + (second - back)
