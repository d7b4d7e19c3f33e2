"""Tell by one number whether processes hold the same batch: nothing is sent or copied, and a GPU need not wait."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from expunge.data.objective import Batch
from expunge.runtime.nested import tensors

LIMIT = 2**20  # so that the squares of the numbers of thousands of processes add up exactly in float64
PERIOD = 8191  # a prime: entries are weighted by their place, so that another order of the same samples is another number
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def mark(batch: Batch, device: torch.device) -> Tensor:
    """A whole number below 2²⁰, as float64, of the bits, shapes and types of all tensors of a batch, and of their order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors(batch):
        total = total * 31 + zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout is torch.strided and tensor.element_size() in WIDTHS and tensor.numel():
            numbers = tensor.detach().contiguous().reshape(-1).view(WIDTHS[tensor.element_size()]).to(torch.int64)
            places = torch.arange(len(numbers), device=numbers.device) % PERIOD + 1
            total = total + (numbers * places).sum().to(device)  # int64 wraps around, everywhere alike
    return ((total ^ (total >> 32)) % LIMIT).double()


def all_equal(size: int, total: Tensor, squares: Tensor) -> Tensor:
    """Whether `size` numbers are one, by their sum and the sum of their squares: size · Σ m² = (Σ m)²."""
    return total.long().square() == size * squares.long()
