"""Memory for per-sample gradients: kept between batches, and cut into chunks that fit the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}  # what of per-sample gradients is alive at a time


class Scratch:
    """Named buffers that are taken again and again: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._begun: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape; what the name held before is overwritten."""
        key, size = (name, like.dtype, like.device), math.prod(shape)
        held = self._held.get(key)
        if held is None or held.numel() < size:
            held = self._held[key] = like.new_empty(size)
        return held[:size].view(shape)

    def take_like(self, name: str, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of the same shape and, where it is dense, the same memory format."""
        dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        flat = self.take(name, (tensor.numel(),), tensor)
        return flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape)

    def total(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A sum that starts at zero with each `begin` and is then added to; in float32 for half precision."""
        total = self.take(f"total {name}", shape, wide(like.new_empty(0)))
        if name not in self._begun:
            self._begun.add(name)
            total.zero_()
        return total

    def begin(self) -> None:
        self._begun.clear()


def wide(tensor: Tensor) -> Tensor:
    """Half precision is squared and summed in float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def chunks(samples: int, size: int, like: Tensor) -> Iterator[range]:
    """Ranges of samples whose per-sample tensors of `size` entries stay within the budget together."""
    budget = CHUNK_BYTES.get(like.device.type, CHUNK_BYTES["cuda"])
    step = max(1, min(samples, budget // max(1, size * like.element_size())))
    for start in range(0, samples, step):
        yield range(start, min(start + step, samples))


def add_squares(total: Tensor, products: Tensor) -> None:
    """total += Σ_n products_n²; the products are overwritten. Half precision is summed in float32."""
    products = products.to(total.dtype)
    if products.is_cuda and products.shape[0] > 1:
        total.add_(torch.linalg.vector_norm(products, dim=0).square_())  # one read of the products, where a square and a sum take three
    elif products.shape[0] <= FEW:
        for product in products:
            total.addcmul_(product, product)
    else:
        total.add_(products.square_().sum(0))


FEW = 4  # large products: one fused pass over each


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right over many rows: float32 within `ROWS` rows, float64 across, since a matmul adds up one row after the other."""
    if left.shape[0] <= ROWS:
        return left.t() @ right
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for some, others in zip(left.split(ROWS), right.split(ROWS), strict=True):
        total += some.t() @ others
    return total


ROWS = 512
