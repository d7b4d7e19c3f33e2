"""The cost of ResetAndDistil against that of a retraining, by the clock.

Run `PYTHONPATH=src python benchmarks/forgetting_cost.py`; torch and numpy are enough. In every round the method, with the share and with
ByFisher, and as many epochs of a plain training on the same remain data take turns. A retraining is 160 such epochs. Writes
results/DEVICE-forgetting-cost.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from expunge.methods import ByFisher, ResetAndDistil
from expunge.training import Constant, OneCycle, Tuning, train
from expunge.unlearning import unlearn
from expunge.vision.datasets import Images
from expunge.vision.zoo import build

EPOCHS, RETRAINING = 5, 160
RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--images", type=int, default=1280, help="of 32×32, ten classes; one of them is forgotten")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bfloat16" if device.type == "cuda" else "float32"
    pixels = torch.randint(0, 256, (options.images, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(options.images) % 10
    images = Images(pixels, labels).to(device)
    model = build(options.network, 10, 3, 0, device)
    train(model, images, Tuning(Constant(0.05, 3), precision=precision), progress=False)
    forget, remain = (Subset(images, torch.where(rows)[0].tolist()) for rows in (labels == 0, labels != 0))
    tuning = Tuning(OneCycle(0.1, EPOCHS), precision=precision)
    variants: dict[str, Callable[[], Any]] = {
        "retraining, as many epochs": lambda: train(
            build(options.network, 10, 3, 1, device), remain, Tuning(Constant(0.1, EPOCHS), precision=precision), progress=False
        ),
        "last third": lambda: unlearn(model, forget, remain, ResetAndDistil(0.35, tuning), watch={}, progress=False),
        "60 % by Fisher": lambda: unlearn(model, forget, remain, ResetAndDistil(ByFisher(0.6), tuning), watch={}, progress=False),
    }
    for call in variants.values():
        call()
    rounds = [{name: seconds(call, device) for name, call in variants.items()} for _ in range(options.rounds)]
    plain, *methods = variants
    # Of a whole retraining, in percent.
    shares = {name: [100 * one[name] / (one[plain] * RETRAINING / EPOCHS) for one in rounds] for name in methods}
    for name, values in shares.items():
        print(f"{name}: {statistics.median(values):.2f} % of a retraining ({min(values):.2f} to {max(values):.2f})")
    about = {
        "network": options.network,
        "images": options.images,
        "torch": torch.__version__,
        "device": device.type,
        "threads": options.threads,
    }
    content = {**about, "epochs": EPOCHS, "retraining": RETRAINING, "seconds": rounds, "percent": shares}
    (RESULTS / f"{device.type}-forgetting-cost.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
