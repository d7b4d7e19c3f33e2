"""What the check of every batch costs: Fisher passes with and without it, and how doubts about rounding were settled.

Run `python benchmarks/confirming_cost.py resnet20 vgg16` on an idle machine; torch and numpy are enough. On CUDA with TF32, as users train.
In turn, without and with the check, after one round that does not count; medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch  # noqa: E402
from measure import Batches, data, median, network, seconds, tensor_cores  # noqa: E402
from networks import CASES  # noqa: E402
from torch import nn  # noqa: E402

from expunge.fisher import adders, diagonal  # noqa: E402
from expunge.fisher.comparing import Comparison  # noqa: E402
from expunge.fisher.confirming import Confirmation  # noqa: E402

SIZES = {"cpu": 64, "cuda": 1024}


class Counts:
    """How many samples were compared in the last call, in how many passes, and how its doubts were settled."""

    confirmation: Confirmation
    compared = comparisons = 0

    def __init__(self) -> None:
        made, begun = adders._confirmation, Comparison.begun

        def confirmation(*given: Any) -> Confirmation:
            self.compared = self.comparisons = 0
            self.confirmation = made(*given)
            return self.confirmation

        def counted(comparison: Comparison, *given: Any, **settings: Any) -> Any:
            self.comparisons += 1
            self.compared += len(comparison.logits)
            return begun(comparison, *given, **settings)

        adders._confirmation = confirmation
        Comparison.begun = counted  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", choices=CASES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, help="default: 64 on a CPU, 1,024 on CUDA")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    counts = Counts()
    for name in options.networks:
        model, size = network(CASES[name], options.device), options.batch_size or SIZES[options.device]
        with tensor_cores(True):
            batches = data(CASES[name], options.device, size, min(options.batches, 16)) * (options.batches // min(options.batches, 16))
            print(f"{name}: {told(model, batches, options.rounds, counts)}", flush=True)


def told(model: nn.Module, batches: Batches, rounds: int, counts: Counts) -> str:
    device, times = batches[0][0].device.type, dict[bool, list[float]]({False: [], True: []})
    for number in range(rounds + 1):
        for confirmed in (False, True):
            adders.CONFIRMED_ON = (device,) if confirmed else ()
            taken = seconds(lambda given: diagonal(model, given), batches)
            times[confirmed] += [taken] if number else []
    without, checked = (median(times[confirmed]) for confirmed in (False, True))
    ratio = median([one / other for one, other in zip(times[True], times[False], strict=True)])
    doubts = ", ".join(f"{count} {way}" for way, count in counts.confirmation.doubts.settled.items()) or "none"
    return (
        f"{len(batches)} batches of {len(batches[0][0])}: {without:.3f} s without, {checked:.3f} s with, {ratio:.3f} times; "
        f"{counts.compared} samples in {counts.comparisons} comparisons; doubts settled: {doubts}"
    )


if __name__ == "__main__":
    main()
