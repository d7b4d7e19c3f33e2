"""Table 4's networks before they know the wrong labels by heart: is the gap to the paper the epoch that the released program keeps?

The released program keeps the epoch that is best on the test set, which with wrong labels may be one from before they are learned; our
networks are those after the last epoch. This trains on mislabelled CIFAR-10 by the recipe, notes the test accuracy after every epoch, and
fine-tunes the networks of some epochs (`--stops`, the best one and the last) for five epochs on the correctly labelled rest, as Finetune
does.

Run `PYTHONPATH=src python benchmarks/noisy_epochs.py --data DIR --fractions 0.1 0.3 0.5 --json FILE`; torch and numpy are enough.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from expunge import unlearn
from expunge.data.batches import measuring_size
from expunge.methods import Finetune
from expunge.vision import datasets
from expunge.vision.recipes import RECIPES, Recipe, changed
from expunge.vision.scenarios import Scenario, mislabelled
from expunge.vision.zoo import Job, Trained, train_networks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.3, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[666, 777, 888])
    parser.add_argument("--stops", type=int, nargs="*", default=[22], help="epochs to fine-tune from, beside the best and the last")
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--images", type=int, help="of the train set, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def finetuned(model: nn.Module, scenario: Scenario, recipe: Recipe, seed: int) -> list[dict[str, float]]:
    """Accuracies on the test set ("remain") and on the wrong labels ("forget"): before, and after each of five epochs."""
    method = Finetune(replace(recipe.replayed(5, seed), precision="bfloat16"))
    outcome = unlearn(model, scenario.forget, scenario.remain, method, watch=scenario.tests, batch_size=measuring_size(model))
    return [dict(record.accuracies) for record in outcome.epochs]


class Kept:
    """Copies of a network: of the epochs asked for, and of the one that is best on the test set so far."""

    def __init__(self, epochs: set[int]) -> None:
        self.epochs, self.models = epochs, {}
        self.best, self.accuracy = 0, -1.0

    def note(self, trained: Trained) -> None:
        epoch, accuracies, _ = trained.curve[-1]
        if accuracies["remain"] > self.accuracy:
            if self.best not in self.epochs:
                self.models.pop(self.best, None)
            self.best, self.accuracy = epoch, accuracies["remain"]
        if epoch == self.best or epoch in self.epochs:
            self.models[epoch] = copy.deepcopy(trained.model)


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    images = datasets.load("cifar10", options.data).to(device)
    train = images.train.take(torch.arange(options.images)) if options.images else images.train
    recipe = changed(RECIPES["cifar10"], epochs=options.epochs)
    found = []
    for fraction in options.fractions:
        for seed in options.seeds:
            scenario = mislabelled(train, fraction, test=images.test, seed=seed)
            kept = Kept({*options.stops, recipe.epochs})
            job = Job(f"{fraction}-{seed}", scenario.train, seed)
            (trained,) = train_networks(
                options.network,
                images.classes,
                images.channels,
                [job],
                recipe,
                device=device,
                precision="bfloat16",
                watch={"remain": images.test},
                noted=kept.note,
            )
            curve = [accuracies["remain"] for _, accuracies, _ in trained.curve]
            tuned = {epoch: finetuned(model, scenario, recipe, seed) for epoch, model in sorted(kept.models.items())}
            found.append({"fraction": fraction, "seed": seed, "best": kept.best, "test accuracy by epoch": curve, "fine-tuned from": tuned})
            for epoch, history in tuned.items():
                name = "best" if epoch == kept.best else "last" if epoch == recipe.epochs else "asked for"
                steps = ", ".join(f"{100 * each['remain']:.1f}" for each in history)
                print(f"{fraction:.0%} wrong, seed {seed}, epoch {epoch} ({name}): test accuracy {steps}", flush=True)
            if options.json:
                content = {"network": options.network, "recipe": asdict(recipe), "torch": torch.__version__, "device": str(device)}
                options.json.write_text(json.dumps({**content, "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
