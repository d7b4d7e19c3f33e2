"""Send a million synthetic samples through `fisher.by_chunks` as a stream, and show that the memory does not grow.

Run `PYTHONPATH=src python benchmarks/stream_memory.py --samples 1000000`; torch, numpy and safetensors are enough.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from expunge import fisher

WIDTH, CLASSES, BATCH = 256, 10, 128


class Synthetic(IterableDataset):
    """Batches made when they are asked for, the same ones each time; 1 kB per sample, never kept."""

    def __init__(self, samples: int) -> None:
        self.batches = samples // BATCH

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        for _ in range(self.batches):
            yield torch.randn(BATCH, WIDTH, generator=random), torch.randint(0, CLASSES, (BATCH,), generator=random)


def peak() -> float:
    """MiB, the most that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    samples = parser.parse_args().samples
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    for size in (samples // 100, samples // 10, samples):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            keep = Path(folder) / "pass"
            sums = fisher.by_chunks(model, DataLoader(Synthetic(size), batch_size=None), keep=keep)
            seconds, files = time.perf_counter() - started, len(list(keep.iterdir()))
        print(
            f"{sums.count:>9,} samples: {seconds:6.1f} s, {sums.count / seconds:,.0f} samples/s, peak {peak():.0f} MiB, {files} files",
            flush=True,
        )


if __name__ == "__main__":
    main()
