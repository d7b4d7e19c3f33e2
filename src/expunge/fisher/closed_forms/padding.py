"""Leave out rows whose gradient is zero, as that of padding is: they add nothing to a product, and send nothing back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOOKED_AT = 64  # rows, before all are: where none of these is zero, few of the others are
SHARE = 1 / 16  # of the rows must be zero to be worth the copies of the others
NARROW = 32  # channels: products of fewer cost no more than the copies


@dataclass(frozen=True)
class Active:
    """The rows of (samples, positions, channels) that have a gradient: their numbers, end to end, and how many are each sample's."""

    rows: Tensor
    counts: list[int]

    @classmethod
    def of(cls, gradients: Tensor) -> Active | None:
        """Those of gradients (N, T, O); None where nearly all rows are active, and on a GPU, which would have to wait for the number."""
        samples, positions, channels = gradients.shape
        if gradients.device.type != "cpu" or samples * positions < LOOKED_AT or channels < NARROW or not gradients.is_contiguous():
            return None
        flat = gradients.view(-1, channels)
        if bool(_any(flat[:: len(flat) // LOOKED_AT]).all()):
            return None
        active = _any(flat)
        rows = active.nonzero().squeeze(1)
        if len(rows) > (1 - SHARE) * len(flat):
            return None
        return cls(rows, active.view(samples, positions).sum(1).tolist())

    def taken(self, tensor: Tensor) -> Tensor:
        """The active rows of (N, T, I), as (rows, I)."""
        return tensor.flatten(0, -2).index_select(0, self.rows)

    def put_back(self, taken: Tensor, shape: torch.Size) -> Tensor:
        """Zeros of this shape but for the active rows."""
        whole = taken.new_zeros(shape)
        whole.view(-1, shape[-1]).index_copy_(0, self.rows, taken)
        return whole

    def split(self, taken: Tensor) -> list[Tensor]:
        """Each sample's rows."""
        return list(taken.split(self.counts))


def _any(rows: Tensor) -> Tensor:
    """Whether a row has an entry other than zero; NaN counts."""
    return rows.norm(dim=1, p=1) != 0
