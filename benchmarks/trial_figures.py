"""FisherMask by the text on the committed networks, one thing changed at a time: what a trial of other code may have done differently.

Run `PYTHONPATH=src python benchmarks/trial_figures.py --data DIR --seeds 666 777 888 --json FILE`; torch, numpy and safetensors are enough.
The trial had 84.1 / 32.2 masked and 85.2 / 1.1 after five epochs (results/README.md), ours 84.4 / 40.4 and 84.9 / 31.7 over three seeds.
On a GPU a seed takes about a minute; `--images` and `--epochs` are for a try on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge import fisher
from expunge.data.batches import measuring_size
from expunge.editing import masks, scores
from expunge.errors import DivergedError
from expunge.metrics import accuracy
from expunge.training import Tuning, train
from expunge.vision import datasets
from expunge.vision.recipes import RECIPES
from expunge.vision.scenarios import category
from expunge.vision.zoo import load_network

RATIO = 0.02
MODELS = Path(__file__).parent.parent / "results" / "models"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[666, 777, 888])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, help="of the train set, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def masks_of(model: nn.Module, forget: Any, remain: Any) -> dict[str, masks.Mask]:
    """By name; the scores of the text (sums) unless the name says otherwise."""
    head = [name for name, _ in model.named_parameters() if name.startswith("classifier")]
    score, expected = (
        scores.fisher_difference(*(fisher.diagonal(model, data, kind=kind, progress=False) for data in (forget, remain)))
        for kind in ("empirical", "expected")
    )
    everything, weights = (masks.candidates(model, head, which=which) for which in ("all", "weights"))
    whole = masks.candidates(model, head, include_head=True, which="all")
    return {
        "as we have it: all but the classifier": masks.select(score, RATIO, candidates=everything),
        "convolutions alone": masks.select(score, RATIO, candidates=weights),
        "classifier too": masks.select(score, RATIO, candidates=whole),
        "in every layer its own top share": masks.select(score, RATIO, "element", "layer", everything),
        "expected Fisher": masks.select(expected, RATIO, candidates=everything),
    }


def masked(model: nn.Module, mask: Mapping[str, Tensor]) -> nn.Module:
    edited = deepcopy(model)
    with torch.no_grad():
        for name, parameter in edited.named_parameters():
            if name in mask:
                parameter.masked_fill_(mask[name].to(parameter.device), 0)
    return edited


def tunings(epochs: int, seed: int, precision: str) -> dict[str, tuple[Tuning, bool]]:
    """By name: the settings, and whether masked weights stay zero."""
    plain = replace(RECIPES["cifar10"].replayed(epochs, seed), precision=precision)
    return {
        "free": (plain, False),
        "frozen": (plain, True),
        "weight decay 5e-4": (replace(plain, weight_decay=5e-4), False),
        "weight decay 5e-4, frozen": (replace(plain, weight_decay=5e-4), True),
        "BatchNorm's statistics fixed": (replace(plain, eval_mode=True), False),
        "another order of samples": (replace(plain, seed=seed + 1), False),
        "float32": (replace(plain, precision="float32"), False),
    }


def main() -> None:
    options, began = arguments(), time.perf_counter()
    device = torch.device(options.device)
    images = datasets.load("cifar10", options.data).to(device)
    if options.images:
        images = replace(images, train=images.train.take(torch.arange(options.images)), test=images.test.take(torch.arange(options.images)))
    scenario = category(images.train, 0, test=images.test)
    results: dict[str, Any] = {}

    def note(seed: int, variant: str, model: nn.Module) -> None:
        values = [100 * accuracy(model, scenario.tests[part], batch_size=measuring_size(model)) for part in ("remain", "forget")]
        results.setdefault(variant, {})[seed] = [round(value, 2) for value in values]
        print(f"{time.perf_counter() - began:6.1f} s  seed {seed}  {variant}: {values[0]:.1f} / {values[1]:.1f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    for seed in options.seeds:
        model = load_network(MODELS / f"cifar10-resnet20-original-seed{seed}.safetensors", device)
        note(seed, "w*", model)
        chosen = masks_of(model, scenario.forget, scenario.remain)
        for name, mask in chosen.items():
            note(seed, f"{name}; masked", masked(model, mask))
        first = next(iter(chosen))
        ways = tunings(options.epochs, seed, "bfloat16" if device.type == "cuda" else "float32")
        plan = [(first, way) for way in ways] + [(name, way) for name in chosen if name != first for way in ("free", "frozen")]
        for name, way in plan:
            if time.perf_counter() - began > options.seconds:
                break
            edited, (tuning, frozen) = masked(model, chosen[name]), ways[way]
            try:
                train(edited, scenario.remain, tuning, mask=chosen[name] if frozen else None, progress=False)
            except DivergedError:  # as with BatchNorm's statistics fixed at this rate
                print(f"{time.perf_counter() - began:6.1f} s  seed {seed}  {name}; {way}: diverged", flush=True)
                continue
            note(seed, f"{name}; {way}", edited)


if __name__ == "__main__":
    main()
