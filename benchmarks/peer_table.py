"""Our methods in the setting of torchunlearn's published table: CIFAR-10, ResNet-18, 5 epochs, its numbers beside.

First `expunge train --dataset cifar10 --network resnet18 --augment --weight-decay 5e-4 --out runs/peer`, and again with `--without 1`; then
`PYTHONPATH=src python benchmarks/peer_table.py --model runs/peer/cifar10-resnet18-augmented-seed0.safetensors --retrained FILE --json OUT`.
RA, FA and TA as there: on the remain and the forget part of the training data and on the test set. Its numbers are in
results/torchunlearn-published.json, and what differs row by row in ../results/README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge import unlearn
from expunge.data.batches import measuring_size
from expunge.errors import DivergedError
from expunge.methods import METHODS
from expunge.metrics import accuracy
from expunge.training import Constant, Tuning
from expunge.vision import datasets
from expunge.vision.scenarios import category, subset
from expunge.vision.zoo import load_network

PUBLISHED = Path(__file__).parent / "results" / "torchunlearn-published.json"
LABEL = 1  # torchunlearn's example; its table does not say
ROWS: dict[str, tuple[str, dict[str, Any]]] = {  # theirs, or ours where they have none: our method and its settings
    "Finetune": ("finetune", {}),
    "NegGrad": ("neg-grad-plus", {"remain_weight": 0.5}),
    "RandomLabel": ("random-labels", {}),
    "SCRUB": ("scrub", {}),
    "BadTeacher": ("bad-teacher", {}),
    "SalUn": ("salun", {}),
    "FisherMask": ("fisher-mask", {}),
    "ResetAndDistil": ("reset-and-distil", {}),
}
OWN_TUNING = ("reset-and-distil",)  # its schedule is part of the method; five epochs as well


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--retrained", type=Path, help="trained without the class, for the row of the retrained network")
    parser.add_argument("--data")
    parser.add_argument("--scenarios", nargs="+", choices=["random", "class"], default=["random", "class"])
    parser.add_argument("--methods", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, help="of both parts of the data, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def accuracies(model: nn.Module, parts: Sequence[Any]) -> list[float]:
    return [round(100 * accuracy(model, data, batch_size=measuring_size(model)), 2) for data in parts]


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    images = datasets.load("cifar10", options.data).to(device)
    train, test = ((part if options.images is None else part.take(torch.arange(options.images))) for part in (images.train, images.test))
    model, published = load_network(options.model, device), json.loads(PUBLISHED.read_text())
    tuning = Tuning(
        Constant(0.01, options.epochs), weight_decay=5e-4, seed=options.seed, precision="bfloat16" if device.type == "cuda" else "float32"
    )
    results: dict[str, dict[str, list[float] | str]] = {}

    def note(kind: str, name: str, row: nn.Module | DivergedError, parts: Sequence[Any]) -> None:
        values, theirs = "diverged" if isinstance(row, DivergedError) else accuracies(row, parts), published[kind].get(name)
        results.setdefault(kind, {})[name] = values
        told = f"{values:20}" if isinstance(values, str) else " ".join(f"{value:6.2f}" for value in values)
        print(f"{name:18} {told}" + ("" if theirs is None else f"   {theirs}"), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    for kind in options.scenarios:
        scenario = category(train, LABEL, test=test) if kind == "class" else subset(train, fraction=0.1, test=test, seed=options.seed)
        parts = scenario.remain, scenario.forget, scenario.tests["remain"]
        print(f"{kind:22} RA     FA     TA     torchunlearn's")
        note(kind, "w*", model, parts)
        if options.retrained is not None and kind == "class":
            note(kind, "Retrain", load_network(options.retrained, device), parts)
        for name in options.methods:
            method, settings = ROWS[name]
            changed = {} if method in OWN_TUNING else {"tuning": tuning}
            try:
                row = unlearn(model, scenario.forget, scenario.remain, METHODS[method](**settings, **changed), progress=False).model
            except DivergedError as error:
                row = error
            note(kind, name, row, parts)


if __name__ == "__main__":
    main()
