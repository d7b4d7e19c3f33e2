"""Recompute a little of what closed forms add, straight from the formula, to compare it with the squares themselves.

Of a parameter one row is taken (of a convolution at one kernel tap, of a vector one entry): G_n, that row of sample n's gradient, from the
rows that are counted to the sample, and Σ_n G_n² over the whole batch. The drawn samples show that such rows are the samples' own; this
shows that what is added is their sum of squares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expunge.fisher.closed_forms import tf32

# How far a sum may be from another of the same terms: as a part of the terms' size, and of the squares.
ROUNDING = {torch.float64: (1e-12, 1e-9), torch.float32: (2e-5, 1e-3)}
COARSE = (2e-2, 5e-2)  # of half precision
SMALLEST = {torch.float64: torch.finfo(torch.float64).tiny}  # of squares; of others as in float32, in which they are added


@dataclass
class Audit:
    """Collects the chosen rows of parameters in a backward pass; of several uses their sum."""

    pick: float  # in [0, 1): which row
    name: str | None = None  # of the one parameter that is audited; None: of all
    once: bool = False  # of parameters whose operations have the same shapes only the first
    places: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    gradients: dict[str, tuple[Tensor, Tensor, float]] = field(default_factory=dict)  # how far they may be off; and squares, as a part
    squares: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # and how far these may be off
    added: dict[str, Tensor] = field(default_factory=dict)  # the rows of totals that were complete before the end of the pass
    _first: dict[Hashable, str] = field(default_factory=dict)  # by the form of an operation

    def wants(self, name: str | None, form: Hashable) -> bool:
        """Whether this parameter's use in an operation of this form is audited; None: always, as each of several uses must be."""
        if name is None or self.name not in (None, name):
            return False
        return not self.once or form is None or self._first.setdefault(form, name) == name

    def add_product(self, name: str, first: Tensor, second: Tensor) -> None:
        """A use whose gradient is firstᵀ second, of (N, T, R) and (N, T, C)."""
        (row,) = self.places.setdefault(name, (int(self.pick * first.shape[2]),))
        self._add(name, first[..., row], second)

    def add_lookup(self, name: str, indices: Tensor, gradients: Tensor) -> None:
        """A use that looks up the rows with these indices, (N, T), and has these gradients there, (N, T, C)."""
        (row,) = self.places.setdefault(name, (int(indices.flatten()[int(self.pick * indices.numel())]),))
        self._add(name, (indices == row).to(gradients.dtype), gradients)

    def add_tap(self, name: str, place: tuple[Any, ...], slopes: Tensor, window: Tensor) -> None:
        """A convolution's output gradient in one channel, (N, L), and the inputs that one tap sees, (N, L, I)."""
        self.places[name] = place
        self._add(name, slopes, window)

    def entry(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Which entry of a vector (or another small parameter) is audited."""
        if name not in self.places:
            number, place = int(self.pick * math.prod(shape)), list[int]()
            for size in reversed(shape):
                place.insert(0, number % size)
                number //= size
            self.places[name] = tuple(place)
        return self.places[name]

    def add_entry(self, name: str, slopes: Tensor, factors: Tensor | None = None) -> None:
        """A use whose gradient there is Σ_t slopes · factors, of (N, T) each; without factors Σ_t slopes."""
        self._add(name, slopes, (torch.ones_like(slopes) if factors is None else factors)[..., None])

    def _add(self, name: str, weights: Tensor, rows: Tensor) -> None:
        weights, rows = weights.detach(), rows.detach().to(weights.dtype)
        terms, part = COARSE if _rounded(rows) else ROUNDING.get(rows.dtype, COARSE)
        gradient = torch.bmm(weights[:, None], rows)[:, 0].double()
        sizes = weights.norm(dim=1)[:, None].double(), rows.norm(dim=1).double()
        error = terms * sizes[0] * sizes[1]  # Σ |terms| is at most the product of norms
        # A factor whose square underflows, as that of a class with a probability of 1e-20, is off by as much, times the other's square.
        error += (SMALLEST.get(rows.dtype, torch.finfo(torch.float32).tiny) * (1 + sizes[0].square() + sizes[1].square())).sqrt()
        if name in self.gradients:
            gradient, error = gradient + self.gradients[name][0], error + self.gradients[name][1]
        self.gradients[name] = gradient, error, part

    def note(self, name: str, total: Tensor) -> None:
        """The total, whose memory may be used again before the end of the pass."""
        if name in self.places:
            self.added[name] = total[self.places[name]].to(torch.float64, copy=True).reshape(-1)

    def settle(self) -> None:
        """After a backward pass: square."""
        for name, (gradient, error, part) in self.gradients.items():
            square = gradient.square()
            slack = (2 * gradient.abs() * error + error.square() + part * square).sum(0)
            before = self.squares.get(name)
            self.squares[name] = (square.sum(0), slack) if before is None else (before[0] + square.sum(0), before[1] + slack)
        self.gradients.clear()

    def wrong(self, squares: dict[str, Tensor]) -> set[str]:
        """The parameters whose squares are not those. A GPU is waited for once."""
        rows = {name: squares[name][self.places[name]].double().reshape(-1) for name in self.squares if name in squares} | self.added
        there = [name for name in self.squares if name in rows]
        if not there:
            return set(self.squares)
        off = [((rows[name] - self.squares[name][0]).abs() > self.squares[name][1]).any() for name in there]
        flags = torch.stack(off).tolist()
        return {name for name in self.squares if name not in rows} | {name for name, flag in zip(there, flags, strict=True) if flag}

    @property
    def silent(self) -> bool:
        """Whether all that was audited is zero, which shows nothing."""
        sums = [expected.sum() for expected, _ in self.squares.values()]
        return not sums or not bool(torch.stack(sums).any())


def _rounded(tensor: Tensor) -> bool:
    """Whether products of these are rounded to TF32."""
    return tensor.is_cuda and tensor.dtype == torch.float32 and (tf32.in_matmuls() or tf32.in_convolutions())
