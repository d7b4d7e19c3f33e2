"""Divide the training data into a few groups whose Fisher sums are stored apart: by class where there are few, else by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from expunge.errors import InputError
from expunge.requests.forget_sets import labels_of
from expunge.requests.task import Task

By = Literal["class", "rows"]
CLASSES = 20  # at most: a group takes 8 bytes per weight, 25 M weights and 1,000 classes 200 GB
CHUNKS = 10


@dataclass(frozen=True, eq=False)
class Grouping:
    """Which group every row is in; groups are numbered from 0 and have names."""

    names: tuple[str, ...]
    group: Tensor  # int64, one per row

    @property
    def samples(self) -> int:
        return len(self.group)

    def rows(self, group: int) -> tuple[int, ...]:
        """All rows of a group, rising."""
        return tuple((self.group == group).nonzero().flatten().tolist())

    def split(self, rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Some rows by their group, both rising."""
        ordered = torch.tensor(sorted(rows), dtype=torch.int64)
        groups = self.group[ordered]
        return {int(group): tuple(ordered[groups == group].tolist()) for group in groups.unique().tolist()}


def group_rows(task: Task, by: By | None = None) -> Grouping:
    """By class where the data have one label per sample and at most 20 classes, unless `by` says otherwise."""
    if by != "rows":
        labels = labels_of(task)
        classes = [] if labels is None else labels.unique().tolist()
        if labels is not None and (1 < len(classes) <= CLASSES or by == "class"):
            return Grouping(tuple(f"label {label}" for label in classes), torch.searchsorted(torch.tensor(classes), labels))
        if by == "class":
            raise InputError("by", "class needs training data with one whole number per sample as target; leave it out", "class")
    samples = task.rows.samples
    chunks = min(CHUNKS, samples)
    group = torch.arange(samples) * chunks // samples
    ends = [(group == chunk).nonzero().flatten() for chunk in range(chunks)]
    return Grouping(tuple(f"rows {int(rows[0])}-{int(rows[-1])}" for rows in ends), group)
