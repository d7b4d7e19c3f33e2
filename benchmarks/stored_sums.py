"""A mask with stored Fisher sums against one without, on data of CIFAR-10's size: for 1 % of the samples, and for a class.

Run `PYTHONPATH=src python benchmarks/stored_sums.py`; torch, numpy and safetensors are enough. Images are noise and the network has fresh
weights: times do not depend on either. With a store: its sums are read, a pass over the samples is made, the mask is drawn. Without: a pass
over all samples too. That pass, and the one that builds the store, are made over a part of the samples (`--part`, a tenth) and scaled up,
time and sums: a pass takes as long per sample, and what is stored does not change how long it takes to read. `--part 1` makes them whole.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expunge import fisher
from expunge.editing import masks, scores
from expunge.fisher import FisherSums
from expunge.methods import FisherMask
from expunge.requests.grouping import group_rows
from expunge.requests.stored_mask import draw
from expunge.requests.summing import Summing
from expunge.requests.sums_building import build
from expunge.requests.sums_store import opened
from expunge.requests.task import load_task

AIMS = {"1 % of the samples": 50, "a class": 200}
TASK = """
from benchmarks.stored_sums import Pictures
from expunge.vision.networks import resnet20

def model():
    return resnet20(10, 3)

def train():
    return Pictures({samples})

def test():
    return Pictures(10)
"""


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Noise of 3×32×32, labels in turn."""

    def __init__(self, samples: int) -> None:
        self.pixels = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(samples))
        self.targets = torch.arange(samples) % 10

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.pixels[row] / 128 - 1, self.targets[row]

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.pixels[rows] / 128 - 1, self.targets[rows]


class Partly(Summing):
    """Sums over the first rows of a block alone, times what is left out."""

    part = 1.0

    def block(self, rows: Sequence[int]) -> FisherSums:
        first = rows[: max(2, round(self.part * len(rows)))]
        sums = super().block(first)
        return replace(sums, sums={name: total * (len(rows) / len(first)) for name, total in sums.sums.items()}, count=len(rows))


def seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--part", type=float, default=0.1, help="share of the samples that passes over all of them are made on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "task.py"
        file.write_text(TASK.format(samples=options.samples))
        task = load_task(file)
        model, grouping = task.model, group_rows(task)
        summing, method = Summing(task, model, "empirical", 128), FisherMask(tuning=None)
        partly = Partly(task, model, "empirical", 128)
        Partly.part = options.part
        started = time.perf_counter()
        build(Path(temporary) / "store", partly, grouping)
        taken = (time.perf_counter() - started) / options.part
        print(f"{options.samples} samples, resnet20, {options.threads} threads; a store is built in about {taken:.0f} s", flush=True)
        generator = torch.Generator().manual_seed(0)
        some = torch.randperm(options.samples, generator=generator)[: options.samples // 100].sort().values.tolist()
        part = max(128, int(options.part * options.samples))
        everything = seconds(lambda: fisher.diagonal(model, task.rows.at(torch.arange(part), True), progress=False), 1) / part

        def with_store(rows: list[int]) -> None:
            with opened(Path(temporary) / "store") as store:
                mask = draw(store, summing, rows, []).mask(method)
                masks.select(scores.fisher_difference(mask.forget_sums, mask.remain_sums), method.ratio)

        met = True
        for name, rows in (("1 % of the samples", some), ("a class", list(grouping.rows(3)))):
            with_store(rows)
            stored = seconds(lambda rows=rows: with_store(rows), options.rounds)
            ratio = everything * options.samples / stored
            met &= ratio >= AIMS[name]
            told = f"{everything * options.samples:.1f} s without a store, {stored:.3f} s with: {ratio:.0f} times (aim {AIMS[name]})"
            print(f"{name} ({len(rows)}): {told}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
