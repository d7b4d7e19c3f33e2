"""What a call of the Fisher engine costs beyond its batches (survey, digest, capture of a graph), and what a further batch costs.

Run `python benchmarks/fixed_cost.py resnet50 vit vgg16 resnet20` on an idle machine; torch and numpy are enough. On CUDA with TF32.
Medians of three calls over one, four and 36 batches, after a first one; the further batch is a 32nd of the last two's difference.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch  # noqa: E402
from measure import data, network, tensor_cores  # noqa: E402
from networks import CASES  # noqa: E402
from peers import plain  # noqa: E402

from expunge.fisher import diagonal  # noqa: E402

FEW, MANY = 4, 36


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", choices=CASES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, help="default: that of fisher_speed.py")
    options = parser.parse_args()
    for name in options.networks:
        with tensor_cores(True):
            print(f"{name}: {told(name, options.device, options.batch_size)}", flush=True)


def told(name: str, device: str, size: int | None) -> str:
    case = CASES[name]
    model = network(case, device)
    batches = data(case, device, size or case.batch[device == "cuda"], FEW) * (MANY // FEW)
    run = plain(model)
    run(batches[:FEW])
    diagonal(model, batches[:FEW])
    floor = seconds(lambda: run(batches[:FEW])) / FEW
    one, few, many = (seconds(lambda count=count: diagonal(model, batches[:count])) for count in (1, FEW, MANY))  # type: ignore[misc]
    further = (many - few) / (MANY - FEW)
    return (
        f"plain {1000 * floor:.2f} ms a batch; a call of one batch {one:.3f} s, of {FEW} {few:.3f} s; a further batch "
        f"{1000 * further:.2f} ms = {further / floor:.2f} plain; beyond the batches {few - FEW * further:.3f} s"
    )


def seconds(run: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    found = []
    for _ in range(3):
        wait()
        started = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


if __name__ == "__main__":
    main()
