"""Add the total of a parameter to the sums of earlier batches as soon as its layer's backward is done.

So few totals are alive at a time, where those of all parameters would be held to the end of the batch. What is added so cannot be taken
back: a batch that fails afterwards voids the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

PLACE = ""  # the name of the memory that all these totals share, one after the other


@dataclass
class Early:
    """The float64 sums, by parameter, that take totals early, and which have taken theirs of this batch."""

    sums: Mapping[str, Tensor]
    added: set[str] = field(default_factory=set)

    def add(self, name: str, total: Tensor) -> None:
        if name in self.added:
            raise RuntimeError(f"{name} is used again in a batch, though its total was complete")
        self.added.add(name)
        self.sums[name].add_(total)
