"""A mask with stored Fisher sums against one without, on data of CIFAR-10's size: for 1 % of the samples, and for a class.

Run `PYTHONPATH=src python benchmarks/stored_sums.py`; torch, numpy and safetensors are enough. Images are noise and the network has fresh
weights: times do not depend on either. With a store: its sums are read, a pass over the samples is made, the mask is drawn. Without: a pass
over all samples too. That pass, and the one that builds the store, are made over a part of the samples (`--part`, a tenth) and scaled up,
time and sums: a pass takes as long per sample, and what is stored does not change how long it takes to read. `--part 1` makes them whole.
Both are measured in every round, one after the other, so that a busy machine slows both: printed are the median of the rounds' ratios, and
the smallest and the largest. With the defaults about 4 minutes on two cores; `--part 0.01 --rounds 3` for a look takes half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expunge import fisher
from expunge.editing import masks, scores
from expunge.fisher import FisherSums
from expunge.fisher.chunks import Pass
from expunge.methods import FisherMask
from expunge.requests.grouping import Grouping, group_rows
from expunge.requests.stored_mask import draw
from expunge.requests.summing import Summing
from expunge.requests.sums_building import build
from expunge.requests.sums_store import opened
from expunge.requests.task import load_task
from expunge.storage.folding import Sums

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


class ScaledPass(Pass):
    """Multiplies its sums by what was left out."""

    part = 1.0

    def sums(self, part: Sums) -> FisherSums:
        sums = super().sums(part)
        totals = {name: total / self.part for name, total in sums.sums.items()}
        return replace(sums, sums=totals, count=round(sums.count / self.part))


class Partly(Summing):
    """Sums over some rows of every group alone, times what is left out."""

    def over(self, rows: Sequence[int], grouping: Grouping) -> Pass:
        step = round(1 / ScaledPass.part)
        whole = super().over([row for part in grouping.split(rows).values() for row in part[::step]], grouping)
        return ScaledPass(**{field.name: getattr(whole, field.name) for field in fields(whole) if field.init})


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--part", type=float, default=0.1, help="share of the samples that passes over all of them are made on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        file, folder = Path(temporary) / "task.py", Path(temporary) / "store"
        file.write_text(TASK.format(samples=options.samples))
        task = load_task(file)
        model, grouping = task.model, group_rows(task)
        summing, method = Summing(task, model, "empirical", 128, options.threads), FisherMask(tuning=None)
        ScaledPass.part = 1 / round(1 / options.part)
        taken = seconds(lambda: build(folder, Partly(task, model, "empirical", 128, options.threads), grouping)) / ScaledPass.part
        print(f"{options.samples} samples, resnet20, {options.threads} threads; a store is built in about {taken:.0f} s", flush=True)
        generator = torch.Generator().manual_seed(0)
        some = torch.randperm(options.samples, generator=generator)[: options.samples // 100].sort().values.tolist()
        part = task.rows.at(torch.arange(max(128, int(options.part * options.samples))), True)

        def with_store(rows: list[int]) -> None:
            with opened(folder) as store:
                mask = draw(store, summing, rows, []).mask(method)
                masks.select(scores.fisher_difference(mask.forget_sums, mask.remain_sums), method.ratio)

        cases = {"1 % of the samples": some, "a class": list(grouping.rows(3))}
        without: list[float] = []
        stored: dict[str, list[float]] = {name: [] for name in cases}
        for rows in cases.values():
            with_store(rows)  # what the first call loads
        for _ in range(options.rounds):
            for name, rows in cases.items():
                stored[name].append(seconds(lambda rows=rows: with_store(rows)))
            pass_over_part = seconds(lambda: fisher.diagonal(model, part, progress=False))
            without.append(pass_over_part * options.samples / len(part))
        met = True
        for name, rows in cases.items():
            ratios = sorted(slow / fast for slow, fast in zip(without, stored[name], strict=True))
            median = statistics.median(ratios)
            met &= median >= AIMS[name]
            times = f"{statistics.median(without):.1f} s without a store, {statistics.median(stored[name]):.3f} s with"
            spread = f"{ratios[0]:.0f} to {ratios[-1]:.0f} in {options.rounds} rounds"
            print(f"{name} ({len(rows)}): {times}: {median:.0f} times as fast ({spread}; aim {AIMS[name]})", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
