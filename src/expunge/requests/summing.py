"""Compute Fisher sums of any rows in one fixed order, so that the same rows have the same sums, to the bit.

F(S) is folded group by group, within a group block by block of its rows in rising order, each block by a pass of its own. What was asked
for before, and in which order, does not enter. A total T from which F(A) was taken is kept as two numbers whose sum is exactly T − F(A):
with F(A) at hand T comes back to the bit, without it nobody can tell T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expunge import fisher
from expunge.fisher import FisherSums
from expunge.requests.grouping import Grouping
from expunge.requests.task import Task
from expunge.runtime.progress import track

BLOCK = 1024  # rows: between two of them a pass can be stopped and resumed


@dataclass(frozen=True, eq=False)
class Summing:
    """How to sum: the model, the data of the task, the kind of Fisher information."""

    task: Task
    model: nn.Module
    kind: str
    batch_size: int
    progress: bool = False

    def block(self, rows: Sequence[int]) -> FisherSums:
        data = self.task.rows.at(torch.tensor(rows), True)
        sums = fisher.diagonal(self.model, data, kind=self.kind, objective=self.task.objective, batch_size=self.batch_size, progress=False)
        return sums.to("cpu")

    def of(self, rows: Sequence[int]) -> FisherSums:
        """Σ over these rows of one group."""
        blocks = track(list(blocks_of(rows)), f"Fisher ({self.kind})", enabled=self.progress and len(rows) > BLOCK)
        return folded(self.block(block) for block in blocks)

    def by_group(self, rows: Sequence[int], grouping: Grouping) -> dict[int, FisherSums]:
        return {group: self.of(part) for group, part in grouping.split(rows).items()}


def blocks_of(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    return (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))


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
