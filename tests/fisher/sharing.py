"""What every process of the tests of shared passes has: a model, data that no number of processes divides, and data that are slow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

KINDS = ("empirical", "sampled", "batch")
CUT = {"batch_size": 16, "batches_per_chunk": 2}


def case() -> tuple[nn.Module, TensorDataset]:
    """A convolutional network in float32, whose sums would differ in their last bits if anything of the order did."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
        )
        return model, TensorDataset(torch.randn(523, 3, 8, 8), torch.randint(0, 5, (523,)))


class Stream(IterableDataset):
    """The same samples, which can only be read from their beginning, and are not counted."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self.data[number] for number in range(len(self.data)))


class Slow(Dataset):
    """Waits before each batch; `ends`: kills its process in the third chunk."""

    def __init__(self, data: TensorDataset, ends: bool, pause: float = 0.1) -> None:
        self.tensors, self.ends, self.pause, self.read = data.tensors, ends, pause, 0

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(rows) > 1:
            time.sleep(self.pause)
            self.read += len(rows)
        if self.ends and self.read > 64:
            os.kill(os.getpid(), signal.SIGKILL)
        return tuple(column[rows] for column in self.tensors)


class Shifting(IterableDataset):
    """A stream with a length that gives each process other samples after the first chunk, as one that is shuffled by rank may."""

    def __init__(self, data: TensorDataset, rank: int, pause: float) -> None:
        self.data, self.rank, self.pause = data, rank, pause

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for number in range(len(self.data)):
            if number % 32 == 0:
                time.sleep(self.pause)  # so that both processes have a part in it
            inputs, label = self.data[number]
            yield (inputs + self.rank if number == 40 else inputs), label


class Failing(Slow):
    """Raises in the middle of its second chunk, on one of the processes."""

    def __init__(self, data: TensorDataset, fails: bool) -> None:
        super().__init__(data, ends=False, pause=0.02)
        self.fails = fails

    def batch_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.fails and self.read > 32:
            raise OSError("the disk of rank 1 is gone")
        return super().batch_of(rows)
