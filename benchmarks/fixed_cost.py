"""What a call of the Fisher engine costs beyond its batches (survey, digest, capture of a graph), and what a further batch costs.

Run `python benchmarks/fixed_cost.py resnet50 vit vgg16 resnet20` on an idle machine; torch and numpy are enough. On CUDA with TF32. Medians
of three calls over one, four and 36 batches, after a first one; the further batch is a 32nd of the last two's difference.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch  # noqa: E402
from measure import data, median, network, seconds, tensor_cores  # noqa: E402
from networks import CASES  # noqa: E402
from peers import Pass, plain  # noqa: E402

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
    forward_and_backward, fisher = plain(model), partial(diagonal, model)

    def taken(run: Pass, count: int) -> float:
        return median([seconds(run, batches[:count]) for _ in range(3)])

    for run in (forward_and_backward, fisher):
        run(batches[:FEW])
    floor = taken(forward_and_backward, FEW) / FEW
    one, few, many = (taken(fisher, count) for count in (1, FEW, MANY))
    further = (many - few) / (MANY - FEW)
    return (
        f"plain {1000 * floor:.2f} ms a batch; a call of one batch {one:.3f} s, of {FEW} {few:.3f} s; a further batch "
        f"{1000 * further:.2f} ms = {further / floor:.2f} plain; beyond the batches {few - FEW * further:.3f} s"
    )


if __name__ == "__main__":
    main()
