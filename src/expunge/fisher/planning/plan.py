"""How each parameter's squares are formed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from expunge.fisher.planning.layouts import Layout


@dataclass
class Plan:
    """The parameters by the way that their squares are formed, and what is known of it."""

    layouts: dict[str, Layout] = field(default_factory=dict)  # by closed form
    batched: list[str] = field(default_factory=list)  # by torch.func
    looped: list[str] = field(default_factory=list)  # one sample at a time
    idle: list[str] = field(default_factory=list)  # not used so far
    ways: dict[str, str] = field(default_factory=dict)  # the operations they are used in
    work: dict[str, int] = field(default_factory=dict)  # multiplications behind their gradients
    reasons: dict[str, str] = field(default_factory=dict)  # why others have none
    entries: int = 0  # that a sample has in the outputs of these operations
    mixes: bool = False  # there are operations that may mix samples
    surveyed: bool = True  # shown to give what the definition gives, on two samples
    logits: torch.Size | None = None  # of some samples

    def revise(self, names: set[str]) -> None:
        """Drop the closed forms of parameters that were used in another way, as control flow that depends on the data may do."""
        for name in names:
            if self.layouts.pop(name, None) is not None:
                self.reasons[name] = "a later batch did not confirm it"
        self.idle = [name for name in self.idle if name not in names]
        self.batched = [name for name in self.batched if name not in names]
        self.looped += sorted(names - {*self.looped})
