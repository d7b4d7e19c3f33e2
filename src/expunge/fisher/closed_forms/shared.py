"""Add up the gradients of a parameter's several uses before the square: tied embeddings and heads, layers called again.

With G_nu the gradient of sample n in use u, Σ_n (Σ_u G_nu)² is wanted:

- linear maps   Σ_u g_uᵀ a_u is one product over the positions of all uses, end to end.
- tables        so are the positions of all lookups.
- both          with L_n the product and E_n the rows that sample n looks up, (L + E)² = L² + E (E + 2 L), the latter on these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from expunge.fisher.closed_forms.padding import Active
from expunge.fisher.closed_forms.products import squared_products
from expunge.fisher.closed_forms.scratch import Scratch, chunks, wide


@dataclass
class Shared:
    """Collects, in a backward pass, the gradients of the named parameters; `settle` squares them after it."""

    names: frozenset[str]
    products: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # firstᵀ second, of (N, T, ...) each
    lookups: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # indices (N, T), gradients (N, T, D)
    rows: dict[str, Tensor] = field(default_factory=dict)  # (N, ...)
    counts: dict[str, int] = field(default_factory=dict)  # of the rows of tables

    def add_product(self, name: str, first: Tensor, second: Tensor) -> None:
        self.products.setdefault(name, []).append((first, second))

    def add_lookup(self, name: str, indices: Tensor, gradients: Tensor, count: int) -> None:
        self.counts[name] = count
        self.lookups.setdefault(name, []).append((indices, gradients))

    def add_rows(self, name: str, rows: Tensor) -> None:
        self.rows[name] = self.rows[name] + rows if name in self.rows else rows

    @torch.no_grad()
    def settle(self, squares: dict[str, Tensor], scratch: Scratch) -> None:
        """Add the squares to the totals."""
        for name, rows in self.rows.items():
            _add(squares, name, rows.square().sum(0))
        for name, parts in self.products.items():
            first, second = (torch.cat(uses, 1) if len(uses) > 1 else uses[0] for uses in zip(*parts, strict=True))
            squares[name] = squared_products(second, first, scratch, name, Active.of(first))
            if name in self.lookups:
                _add(squares, name, self._pairs(self.lookups.pop(name), self.counts[name]).beside(first, second))
        for name, lookups in self.lookups.items():
            _add(squares, name, self._pairs(lookups, self.counts[name]).squares())
        for collected in (self.rows, self.products, self.lookups):
            collected.clear()

    def _pairs(self, lookups: list[tuple[Tensor, Tensor]], count: int) -> Pairs | Slots:
        indices, gradients = (torch.cat(parts, 1) for parts in zip(*lookups, strict=True))
        return looked_up(indices, gradients, count)


def looked_up(indices: Tensor, gradients: Tensor, count: int) -> Pairs | Slots:
    """The gradients, by sample, of the rows of a table, from indices (N, T) and gradients (N, T, D)."""
    return (Pairs if indices.device.type == "cpu" else Slots).of(indices, gradients, count)


@dataclass(frozen=True)
class Pairs:
    """The (sample, index) pairs that occur, and the gradient of each: the sum over the sample's positions that hold the index."""

    samples: Tensor
    indices: Tensor
    sums: Tensor
    count: int  # rows of the table

    @classmethod
    def of(cls, indices: Tensor, gradients: Tensor, count: int) -> Pairs:
        """From indices (N, T) and gradients (N, T, D)."""
        g = wide(gradients)
        owner = torch.arange(len(indices), device=indices.device)[:, None] * count
        pairs, place = torch.unique(owner + indices, return_inverse=True)
        sums = g.new_zeros(len(pairs), g.shape[-1]).index_add_(0, place.flatten(), g.flatten(0, 1))
        return cls(pairs // count, pairs % count, sums, count)

    def squares(self) -> Tensor:
        """Σ_n E_n²."""
        return self.sums.new_zeros(self.count, self.sums.shape[1]).index_add_(0, self.indices, self.sums.square())

    def beside(self, first: Tensor, second: Tensor) -> Tensor:
        """Σ_n E_n (E_n + 2 L_n) with L_n = first_nᵀ second_n, of which only the rows of E_n are formed."""
        total = self.sums.new_zeros(self.count, self.sums.shape[1])
        for sample in range(len(first)):
            here = (self.samples == sample).nonzero().squeeze(1)
            rows, own = self.indices[here], self.sums[here]
            product = wide(first[sample].index_select(1, rows).t() @ second[sample])
            total.index_add_(0, rows, own * (own + 2 * product))
        return total


@dataclass(frozen=True)
class Slots:
    """The same on a GPU, which would have to be waited for to learn how many pairs there are: as many slots per sample as positions.

    A slot that no index needs has index 0 and a gradient of zero.
    """

    indices: Tensor  # (N, T)
    sums: Tensor  # (N, T, D)
    count: int

    @classmethod
    def of(cls, indices: Tensor, gradients: Tensor, count: int) -> Slots:
        g, (samples, positions) = wide(gradients), indices.shape
        ordered, order = indices.sort(dim=1)
        later = torch.zeros_like(ordered)
        later[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        place = torch.empty_like(order).scatter_(1, order, later.cumsum(1))
        rows = (place + torch.arange(samples, device=place.device)[:, None] * positions).flatten()
        sums = g.new_zeros(samples * positions, g.shape[-1]).index_add_(0, rows, g.flatten(0, 1))
        return cls(torch.zeros_like(indices).scatter_(1, place, indices), sums.view_as(g), count)

    def squares(self) -> Tensor:
        return self._added(self.sums.square())

    def beside(self, first: Tensor, second: Tensor) -> Tensor:
        total = self.sums.new_zeros(self.count, self.sums.shape[2])
        for rows in chunks(len(first), first.shape[1] * self.indices.shape[1], first):
            cut = slice(rows.start, rows.stop)
            picked = first[cut].gather(2, self.indices[cut, None].expand(-1, first.shape[1], -1))
            product, own = wide(torch.bmm(picked.transpose(1, 2), second[cut])), self.sums[cut]
            total += Slots(self.indices[cut], own, self.count)._added(own * (own + 2 * product))
        return total

    def _added(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.count, rows.shape[2]).index_add_(0, self.indices.flatten(), rows.flatten(0, 1))


def _add(squares: dict[str, Tensor], name: str, total: Tensor) -> None:
    squares[name] = squares[name].add_(total) if name in squares else total
