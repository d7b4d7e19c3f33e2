"""FisherMask's readings on the digits: head in or out, λ, ratio; after masking alone and after fine-tuning, on the test part.

    PYTHONPATH=src python benchmarks/readings.py [--seeds 5] [--epochs 40] > table.md

Trains one network a seed by the demo's recipe, then tries every setting on it. Nothing is chosen: all that was measured is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from expunge import fisher
from expunge.data.batches import as_batches
from expunge.editing import masks, scores
from expunge.editing.patches import Patch
from expunge.metrics import accuracy
from expunge.model import heads
from expunge.training.loop import train
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import recipe, trained
from expunge.vision.scenarios import category

RATIOS = (0.01, 0.02, 0.05)
REMAIN_WEIGHTS = (None, 1.0, 3.0, 10.0)
KINDS = ("empirical", "expected")


def measure(seed: int, epochs: int, rows: dict[tuple[str, str, str, float], list[list[float]]]) -> None:
    """Add one seed's four accuracies in percent to every setting's list: remain and forget, masked and tuned."""
    data = digits(seed)
    model = trained(data.train, epochs, seed)
    train_part, _, test = (category(part, 0) for part in data)
    head = heads.find(model, next(iter(as_batches(train_part.forget))))

    def tested() -> list[float]:
        return [100 * accuracy(model, part) for part in (test.remain, test.forget)]

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in KINDS:
        forget, remain = (fisher.diagonal(model, as_batches(part), kind=kind) for part in train_part)
        for include_head in (False, True):
            allowed = masks.candidates(model, head, include_head, which="all")
            for remain_weight in REMAIN_WEIGHTS:
                score = scores.fisher_difference(forget, remain, remain_weight)
                for ratio in RATIOS:
                    Patch.zeroing(model, masks.select(score, ratio, candidates=allowed)).apply(model)
                    found = tested()
                    train(model, train_part.remain, recipe(5, seed))
                    found += tested()
                    model.load_state_dict(before)
                    weight = "sums" if remain_weight is None else f"{remain_weight:g}"
                    rows.setdefault((kind, "in" if include_head else "out", weight, ratio), []).append(found)
    print(f"seed {seed}: w* {tested()[0]:.1f} / {tested()[1]:.1f}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[tuple[str, str, str, float], list[list[float]]] = {}
    for seed in range(options.seeds):
        measure(seed, options.epochs, rows)
    print("| Fisher | head | λ | R | remain, masked | forget, masked | remain, tuned | forget, tuned |")
    print("|---|---|---|---|---|---|---|---|")
    for (kind, head, weight, ratio), found in rows.items():
        columns = [f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" for values in zip(*found, strict=True)]
        print(f"| {kind} | {head} | {weight} | {ratio:g} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
