"""Read batches and check them before they are used; on a GPU a few ahead, so that the device has work while the next are checked.

To look at numbers on a GPU is to wait for everything that was queued there before. Here a batch is looked at on a stream of its own, which
waits for nothing but what made the batch, and the answer is read when the batch's turn comes, some batches later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.data.batches import to_device
from expunge.data.labels import IGNORED
from expunge.data.objective import Batch, Objective, batch_targets
from expunge.errors import InputError
from expunge.model.checks import check_batch
from expunge.runtime.nested import tensors

AHEAD = 4  # batches at least
MOST_AHEAD = 16  # of small ones: to launch a deep network's comparison takes as long as ten of its batches
MOST_BYTES = 512 << 20  # of what is more than the least


class Labels(NamedTuple):
    """The form of a batch's integer labels, and the smallest and the largest that counts."""

    dimensions: int
    low: int
    high: int

    def inside(self, logits: torch.Size) -> bool:
        """Whether they surely name outputs of the head."""
        return len(logits) > 1 and self.dimensions == len(logits) - 1 and 0 <= self.low and self.high < logits[1]


def checked(batches: Iterator[Batch], device: torch.device, objective: Objective) -> Iterator[tuple[Batch, Labels | None]]:
    """The batches on the device, each checked, and its labels where they could be looked at without waiting."""
    if device.type != "cuda":
        for batch in batches:
            check_batch(batch, "batches", objective)
            yield to_device(batch, device), None
        return
    waiting, stream = deque[_Looked](), torch.cuda.Stream(device)
    for batch in batches:
        waiting.append(_Looked(batch, device, objective, stream))
        while len(waiting) > _ahead(batch):
            yield waiting.popleft().read()
    while waiting:
        yield waiting.popleft().read()


def _ahead(batch: Batch) -> int:
    """How many batches like this one to look at before they are used."""
    return min(MOST_AHEAD, max(AHEAD, MOST_BYTES // max(1, sum(tensor.nbytes for tensor in tensors(batch)))))


class _Looked:
    """A batch of a GPU that is being looked at."""

    def __init__(self, batch: Batch, device: torch.device, objective: Objective, stream: torch.cuda.Stream) -> None:
        self.batch, self.objective, self.done = batch, objective, torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        self.there = all(tensor.device == device for tensor in tensors(batch))
        self.numbers, self.dimensions = None, 0
        if not self.there:
            check_batch(batch, "batches", objective)
        with torch.cuda.stream(stream):
            if not self.there:
                self.batch = to_device(batch, device)
            numbers, self.dimensions = numbers_of(self.batch, objective)
            if numbers is not None:
                self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
        self.done.record(stream)

    def read(self) -> tuple[Batch, Labels | None]:
        self.done.synchronize()
        sound, labels = read_numbers(self.numbers, self.dimensions)
        if self.there and not sound:
            check_batch(self.batch, "batches", self.objective)
        if not self.there:
            for tensor in tensors(self.batch):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return to_device(self.batch, tensors(self.batch)[0].device) if self.there else self.batch, labels


def numbers_of(batch: Batch, objective: Objective) -> tuple[Tensor | None, int]:
    """How many numbers are not finite, and the smallest and largest label that counts, as one tensor; and the labels' dimensions."""
    floating = [tensor.detach() for tensor in tensors(batch) if tensor.is_floating_point()]
    flags = [(~torch.isfinite(tensor)).any().long() for tensor in floating]
    try:
        targets = batch_targets(batch) if objective.targets is batch_targets else None
    except InputError:
        targets = None
    if targets is None or targets.dtype != torch.int64 or not targets.numel() or not targets.is_cuda == tensors(batch)[0].is_cuda:
        return (sum(flags[1:], flags[0])[None] if flags else None), 0
    counted = torch.where(targets == IGNORED, 0, targets) if targets.dim() > 1 else targets
    bad = sum(flags[1:], flags[0]) if flags else torch.zeros((), dtype=torch.int64, device=targets.device)
    return torch.stack([bad, *torch.aminmax(counted)]), targets.dim()


def read_numbers(numbers: Tensor | None, dimensions: int) -> tuple[bool, Labels | None]:
    """Whether the batch is surely finite, and its labels; False where it must be looked at again, with the whole check."""
    if numbers is None:
        return False, None
    bad, *ends = numbers.tolist()
    return not bad, Labels(dimensions, *ends) if ends else None
