"""What the check of every batch costs: Fisher passes with and without it, and how doubts about rounding were settled.

Run `python benchmarks/confirming_cost.py resnet20 vgg16` on an idle machine; torch and numpy are enough. On CUDA with TF32, as users train.
In turn, without and with the check, after one round that does not count; medians. On CUDA the check is off unless
`expunge.fisher.engine.CONFIRMED_ON` names it: where the ratio is at most 1.03 and no whole batch was computed in float64, it can be on.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch  # noqa: E402
from measure import Batches, data, median, network, seconds, tensor_cores  # noqa: E402
from networks import CASES  # noqa: E402
from torch import nn  # noqa: E402

from expunge.fisher import diagonal, engine  # noqa: E402
from expunge.fisher.confirming import Confirmation  # noqa: E402

SIZES = {"cpu": 64, "cuda": 1024}


class Counted(Confirmation):
    """Counts, over all calls, how doubts were settled and how many samples were compared."""

    settled: Counter[str] = Counter()
    compared = comparisons = 0

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.doubts.settled = Counted.settled

    def _compare(self, group: list, *rest: object, **settings: bool) -> None:  # type: ignore[type-arg]
        Counted.comparisons += 1
        Counted.compared += sum(map(len, group))
        super()._compare(group, *rest, **settings)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", choices=CASES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, help="default: 64 on a CPU, 1,024 on CUDA")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engine.Confirmation = Counted  # type: ignore[misc]
    for name in options.networks:
        model, size = network(CASES[name], options.device), options.batch_size or SIZES[options.device]
        with tensor_cores(True):
            print(f"{name}: {told(model, data(CASES[name], options.device, size, options.batches), options.rounds)}", flush=True)


def told(model: nn.Module, batches: Batches, rounds: int) -> str:
    device, times = batches[0][0].device.type, dict[bool, list[float]]({False: [], True: []})
    for number in range(rounds + 1):
        for confirmed in (False, True):
            engine.CONFIRMED_ON = (device,) if confirmed else ()
            Counted.settled.clear()
            Counted.compared = Counted.comparisons = 0
            taken = seconds(lambda given: diagonal(model, given), batches)
            times[confirmed] += [taken] if number else []
    without, checked = (median(times[confirmed]) for confirmed in (False, True))
    ratio = median([one / other for one, other in zip(times[True], times[False], strict=True)])
    doubts = ", ".join(f"{count} {way}" for way, count in Counted.settled.items()) or "none"
    return (
        f"{len(batches)} batches of {len(batches[0][0])}: {without:.3f} s without, {checked:.3f} s with, {ratio:.3f} times; "
        f"{Counted.compared} samples in {Counted.comparisons} comparisons; doubts settled: {doubts}"
    )


if __name__ == "__main__":
    main()
