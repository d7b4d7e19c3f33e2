"""The share of a training's time that is the network's own forward and backward, on the CPU.

Run `PYTHONPATH=src python benchmarks/training_share.py`; torch and numpy are enough. On the CPU nothing runs behind
one's back, so the time between entering and leaving a forward or a backward is theirs. The rest of an epoch is reading and normalising
the batches, the loss, the optimizer and the loop itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expunge.data.objective import Objective, model_outputs
from expunge.training.loop import train
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.vision.datasets import Images
from expunge.vision.networks import NETWORKS

AIM = 0.9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--batches", type=int, default=4, help="of 128 images of 32×32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


class Timed:
    """A function that counts the seconds spent in it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.call(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - started


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    count = 128 * options.batches
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    images = Images(pixels, torch.randint(0, 10, (count,), generator=generator))
    torch.manual_seed(0)
    model = NETWORKS[options.network]()
    forward, backward = Timed(model_outputs), Timed(Tensor.backward)
    Tensor.backward = lambda *arguments, **named: backward(*arguments, **named)
    epochs: list[tuple[float, float]] = [(time.perf_counter(), 0.0)]
    note = lambda epoch: epochs.append((time.perf_counter(), forward.seconds + backward.seconds))  # noqa: E731
    train(model, images, Tuning(Constant(0.01, options.rounds + 1)), Objective(outputs=forward), after_epoch=note, progress=False)
    between = list(zip(epochs[1:], epochs[2:], strict=False))  # without the first epoch, which looks at the data
    shares = [(inside - inside_before) / (now - before) for (before, inside_before), (now, inside) in between]
    step = statistics.median(now - before for (before, _), (now, _) in between) / options.batches
    print(
        f"training {options.network} on {options.threads} threads: {100 * statistics.median(shares):.1f} % of the time in the network's "
        f"forward and backward ({100 * min(shares):.1f} to {100 * max(shares):.1f}; aim {100 * AIM:.0f}), {1000 * step:.0f} ms a step"
    )


if __name__ == "__main__":
    main()
