"""Take per-sample gradients where a backward pass has them to the totals of their parameters."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.closed_forms.drawn import Drawn, Gradients, Part
from expunge.fisher.closed_forms.scratch import Scratch, wide
from expunge.fisher.closed_forms.shared import Shared
from expunge.fisher.planning.layouts import SINGLE, Layout


@dataclass(slots=True)
class Use:
    """One use of parameters in a forward pass: their names, where the samples are, and where the squares go."""

    weight: str | None  # the parameter's name; None where it is not wanted
    bias: str | None
    layout: Layout
    samples: int
    scratch: Scratch
    squares: dict[str, Tensor]  # totals of the pass, in the shapes of the parameters
    vectors: list[tuple[str, Tensor]]  # gradients of vectors, (samples, channels), that `settle` squares
    drawn: Drawn | None = None  # samples to keep for a check
    shared: Shared | None = None  # collects those of parameters with several uses

    def has_several(self, *names: str | None) -> bool:
        """Whether one of these parameters has other uses, whose gradients must be added before the square."""
        return self.shared is not None and any(name in self.shared.names for name in names)

    def takes(self, *names: str | None) -> bool:
        """Whether the drawn samples of this use are to be kept: of several uses of a parameter all or none."""
        if self.drawn is None or not self.drawn.open:
            return False
        return self.drawn.takes(*names) if not self.has_several(*names) else self.drawn.rows.shape[0] > 0

    def add(self, name: str, squares: Tensor) -> None:
        self.squares[name] = self.squares[name].add_(squares) if name in self.squares else squares

    def finish(self, name: str, total: Tensor) -> None:
        """The total of a parameter with one use is complete for this backward pass."""
        if not self.scratch.finish(name, total):
            self.squares[name] = total
        elif self.audit is not None:
            self.audit.note(name, total)

    def rows(self, tensor: Tensor) -> Tensor:
        return self.layout.rows(tensor, self.samples)

    def keep(self, gradients: Gradients, inputs: Tensor, slopes: Tensor) -> None:
        """Keep the drawn samples' rows of an operation whose weight has the gradients `gradients(inputs, slopes)`."""
        if self.takes(self.weight, self.bias):
            assert self.drawn is not None
            g = self._drawn(slopes, self.drawn)
            a = g if inputs is slopes else self._drawn(inputs, self.drawn)
            self.drawn.parts.append(Part(self.weight, self.bias, gradients, a, g))

    def _drawn(self, tensor: Tensor, drawn: Drawn) -> Tensor:
        rows = self.layout.drawn(tensor, self.samples, drawn.rows)
        if drawn.rows.shape[0] == 1 and tensor.device.type == "cpu":  # small pieces of fresh memory would slow down the whole pass
            return self.scratch.copied(drawn.slot, rows)
        return rows

    @property
    def audit(self) -> Audit | None:
        return None if self.drawn is None else self.drawn.audit

    def audited(self, name: str | None, *form: Hashable) -> Audit | None:
        """The audit, where this parameter's use in an operation of this form takes part in it."""
        if self.drawn is None or name is None:
            return None
        several, audit = self.has_several(name), self.drawn.audit
        if self.drawn.forms is not None:
            self.drawn.forms.add((name, *form) if several else form)
        return audit if audit is not None and audit.wants(name, None if several else form) else None

    def add_bias(self, gradient: Tensor, channel: int) -> None:
        """(Σ over all but sample and channel)², summed over samples."""
        if self.bias is None:
            return
        self.audit_bias(gradient, channel)
        self.add_rows(self.bias, wide(self.by_channel(gradient, channel)))

    def audit_bias(self, gradient: Tensor, channel: int, dimensions: int = 1) -> None:
        if (audit := self.audited(self.bias, "bias", channel, dimensions, gradient.shape[1:])) is not None:
            assert self.bias is not None
            audit.add_entry(self.bias, self.entries(audit, self.bias, gradient, channel, dimensions))

    def entries(self, audit: Audit, name: str, tensor: Tensor, channel: int, dimensions: int = 1) -> Tensor:
        """(samples, positions), where the tensor has the audited entry of this parameter, which covers so many dimensions."""
        channel %= tensor.dim()
        entry = audit.entry(name, tensor.shape[channel : channel + dimensions])
        return self.rows(tensor[(slice(None),) * channel + entry]).flatten(1)

    def add_vectors(self, weight: Tensor, bias: Tensor) -> None:
        """Gradients of a weight and a bias that are vectors, each (samples, channels)."""
        for name, part in ((self.weight, weight), (self.bias, bias)):
            if name is not None:
                self.add_rows(name, part)

    def add_rows(self, name: str, rows: Tensor) -> None:
        """Gradients of a vector, (samples, channels)."""
        if self.has_several(name):
            assert self.shared is not None
            self.shared.add_rows(name, rows)
        else:
            self.vectors.append((name, rows))

    def by_channel(self, tensor: Tensor, channel: int) -> Tensor:
        """Sums over all but sample and channel: (samples, channels)."""
        if self.layout == SINGLE:
            positions = [index for index in range(1, tensor.dim()) if index != channel % tensor.dim()]
            return tensor.sum(positions) if positions else tensor
        rows = self.rows(tensor.movedim(channel, -1) if channel not in (-1, tensor.dim() - 1) else tensor)
        return rows.sum(tuple(range(1, rows.dim() - 1))) if rows.dim() > 2 else rows


def settle(squares: dict[str, Tensor], vectors: list[tuple[str, Tensor]]) -> None:
    """Square the gradients of all vectors at once: a network has many and they are short."""
    if not vectors:
        return
    names, rows = zip(*vectors, strict=True)
    totals = torch.cat(rows, 1).square_().sum(0).split([part.shape[1] for part in rows])
    for name, total in zip(names, totals, strict=True):
        squares[name] = squares[name].add_(total) if name in squares else total
    vectors.clear()


def as_chosen(gradient: Tensor) -> AbstractContextManager[Any]:
    """Types are as the forward pass chose them: no second cast in backward."""
    place = gradient.device.type
    return torch.autocast(place, enabled=False) if torch.is_autocast_enabled(place) else nullcontext()
