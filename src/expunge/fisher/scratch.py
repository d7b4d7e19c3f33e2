"""Memory for per-sample gradients: kept between batches, and cut into chunks that fit the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # what of per-sample gradients is alive at a time


class Scratch:
    """Named buffers that are taken again and again: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape; what the name held before is overwritten."""
        key, size = (name, like.dtype, like.device), math.prod(shape)
        held = self._held.get(key)
        if held is None or held.numel() < size:
            held = self._held[key] = like.new_empty(size)
        return held[:size].view(shape)


def chunks(samples: int, size: int, like: Tensor) -> Iterator[range]:
    """Ranges of samples whose per-sample tensors of `size` entries stay within the budget together."""
    budget = CHUNK_BYTES.get(like.device.type, CHUNK_BYTES["cuda"])
    step = max(1, min(samples, budget // max(1, size * like.element_size())))
    for start in range(0, samples, step):
        yield range(start, min(start + step, samples))


def add_squares(total: Tensor, products: Tensor) -> None:
    """total += Σ_n products_n²; the products are overwritten. Half precision is summed in float32."""
    if products.dtype != total.dtype:
        products = products.to(total.dtype)
    if products.shape[0] == 1:
        total.addcmul_(products[0], products[0])
    else:
        total.add_(products.square_().sum(0))


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right over many rows: float32 within `ROWS` rows, float64 across, since a matmul adds up one row after the other."""
    if left.shape[0] <= ROWS:
        return left.t() @ right
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for some, others in zip(left.split(ROWS), right.split(ROWS), strict=True):
        total += some.t() @ others
    return total


ROWS = 512
