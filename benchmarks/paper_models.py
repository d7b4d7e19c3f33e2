"""The paper's networks on the full CIFAR-10 and MNIST: w*, and the same network trained without class 0, seed by seed.

Run `PYTHONPATH=src python benchmarks/paper_models.py --data DIR --network resnet20 --seeds 666 777 888 --out FOLDER`; torch and numpy
are enough, safetensors too where the weights are to be kept. All networks of a call share the device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from expunge.vision import datasets
from expunge.vision.networks import NETWORKS
from expunge.vision.recipes import RECIPES, changed
from expunge.vision.scenarios import category
from expunge.vision.zoo import Job, train_networks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--dataset", choices=RECIPES, default="cifar10")
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--seeds", type=int, nargs="+", default=[666, 777, 888])
    parser.add_argument("--label", type=int, default=0, help="the class that is left out of the retrained network")
    parser.add_argument("--only", choices=["original", "retrained"], help="default: both")
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--rate", type=float, help="default: the recipe's")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--draw", choices=["he", "torch"], default="he", help="fresh weights: our networks' own, or PyTorch's default")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--every", type=int, default=4, help="epochs between two points of a curve")
    parser.add_argument("--images", type=int, help="of the train set, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/paper-models"))
    parser.add_argument(
        "--keep", action="store_true", help="the state after every epoch, to go on after a stop, and the weights at the end"
    )
    return parser.parse_args()


def drawn_by_torch(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The same networks, each layer's weights as PyTorch draws them by default."""

    def fresh(*arguments: int) -> nn.Module:
        network = build(*arguments)
        for module in network.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return network

    return fresh


def main() -> None:
    options = arguments()
    if options.draw == "torch":
        NETWORKS[options.network] = drawn_by_torch(NETWORKS[options.network])
    device = torch.device(options.device)
    images = datasets.load(options.dataset, options.data).to(device)
    if options.images:
        images = replace(images, train=images.train.take(torch.arange(options.images)))
    scenario = category(images.train, options.label, test=images.test)
    recipe = changed(RECIPES[options.dataset], epochs=options.epochs, rate=options.rate)
    kinds = {"original": images.train, "retrained": scenario.remain}
    label = f"{options.dataset}-{options.network}"
    jobs = [
        Job(f"{label}-{kind}-seed{seed}", data, seed)
        for kind, data in kinds.items()
        if options.only in (None, kind)
        for seed in options.seeds
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    trained = train_networks(
        options.network,
        images.classes,
        images.channels,
        jobs,
        recipe,
        device=device,
        precision=options.precision,
        compiled=options.compile,
        watch=scenario.tests,
        every=options.every,
        out=options.out if options.keep else None,
    )
    seconds = time.perf_counter() - started
    content = {
        "dataset": options.dataset,
        "network": options.network,
        "recipe": asdict(recipe),
        "precision": options.precision,
        "weights_drawn_by": options.draw,
        "compiled": options.compile,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "seconds": seconds,
        "trained_together": len(jobs),
        "networks": {each.job.name: {"seed": each.job.seed, "digest": each.digest, "curve": each.curve} for each in trained},
    }
    (options.out / f"{label}.json").write_text(json.dumps(content, indent=1) + "\n")
    for kind in kinds:
        ends = [each.curve[-1][1] for each in trained if f"-{kind}-" in each.job.name]
        for part in ends[0] if ends else []:
            values = [100 * end[part] for end in ends]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{label} {kind}: {part} {statistics.mean(values):.2f} ± {spread:.2f} % ({len(values)} seeds)")
    print(f"{len(jobs)} networks, {recipe.epochs} epochs each, {seconds:.1f} s in total")


if __name__ == "__main__":
    main()
