"""Networks trained with the fused kernels and with PyTorch's operations: accuracy on the test part, seed by seed, and seconds an epoch.

Run `PYTHONPATH=src python benchmarks/fused_accuracy.py --data DIR` on a GPU: Tiny-ImageNet, or a part of it, at 32x32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from expunge.metrics import accuracy
from expunge.training import fused
from expunge.training.schedules import Steps
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning
from expunge.vision import datasets
from expunge.vision.networks import NETWORKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["densenet100", "googlenet"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, help="of the train set, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    images = datasets.load("tiny-imagenet", options.data, size=32).to(options.device)
    train, test = images.train, images.test
    if options.images:
        train = train.take(torch.arange(options.images))
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name in options.networks:
        found[name] = {}
        for variant in ("PyTorch's operations", "fused kernels"):
            plain = patch.object(fused, "takes", lambda x: False) if variant != "fused kernels" else nullcontext()
            began, accuracies = time.perf_counter(), []
            models = []
            for seed in options.seeds:
                torch.manual_seed(seed)
                model = NETWORKS[name](images.classes, images.channels).to(options.device)
                models.append(model.to(memory_format=torch.channels_last))
            schedule = Steps(0.05, options.epochs, (0.6 * options.epochs, 0.85 * options.epochs), warmup=1)
            tunings = [Tuning(schedule, options.batch_size, seed=seed, precision="bfloat16") for seed in options.seeds]
            with plain:
                train_together([Training(model, train, tuning) for model, tuning in zip(models, tunings, strict=True)])
            seconds = time.perf_counter() - began
            accuracies = [100 * accuracy(model, test) for model in models]
            found[name][variant] = {"accuracy": accuracies, "seconds": seconds}
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            print(f"{name:12} {variant:22} {statistics.mean(accuracies):.1f} ± {spread:.1f} % {accuracies}, {seconds:.1f} s", flush=True)
    if options.json:
        place = torch.cuda.get_device_name() if options.device == "cuda" else options.device
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "data")}
        options.json.write_text(json.dumps({"torch": torch.__version__, "device": place, **settings, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
