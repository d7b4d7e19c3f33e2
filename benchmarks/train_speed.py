"""Seconds an epoch of training: ours, against the same loop run eagerly with a DataLoader; and several networks sharing the device.

Run `PYTHONPATH=src python benchmarks/train_speed.py --device cuda --json FILE`; torch and numpy are enough. Images are random bytes of
CIFAR-10's form: the time does not depend on what they show. Variants are interleaved, an epoch of each in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge.training import fused
from expunge.training.loop import train
from expunge.training.schedules import Constant
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning
from expunge.vision.datasets import Images
from expunge.vision.networks import NETWORKS

EPOCH = 50_000  # images; times of fewer are scaled up
DEFAULT = ("resnet20", "vgg16", "googlenet", "densenet100")
LOADER = "DataLoader, float32, eager"
VARIANTS = ("float32", "bfloat16", "bfloat16, without our kernels", LOADER)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=DEFAULT)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--loader-share", type=float, default=1.0, help="of the images for the slow DataLoader loop, scaled up")
    parser.add_argument("--together", type=int, nargs="*", default=[1, 2, 3, 4, 6], help="how many networks share the device")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile, which takes a minute to compile")
    parser.add_argument("--workers", type=int, default=4, help="of the DataLoader")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def synthetic(count: int, device: str) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.randint(0, 10, (count,), generator=generator)).to(device)


def fresh(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name]().to(device)
    return model.to(memory_format=torch.channels_last) if device == "cuda" else model


def tuning(epochs: int, precision: str) -> Tuning:
    return Tuning(Constant(0.01, epochs), 128, precision=precision)


class Clock:
    """Times of epochs, from the calls after each."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, []
        self.tick()

    def tick(self, epoch: int = 0) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    @property
    def epochs(self) -> list[float]:
        return [after - before for before, after in zip(self.times[:-1], self.times[1:], strict=True)]


def ours(name: str, images: Images, device: str, rounds: int, precision: str, compiled: bool = False) -> list[float]:
    """The first epoch, with its captures, is left out."""
    model, clock = fresh(name, device), Clock(device)
    train(torch.compile(model) if compiled else model, images, tuning(rounds + 1, precision), after_epoch=clock.tick, progress=False)
    return clock.epochs[1:]


def without_kernels(name: str, images: Images, device: str, rounds: int) -> list[float]:
    with patch.object(fused, "takes", lambda x: False):
        return ours(name, images, device, rounds, "bfloat16")


def loader_loop(name: str, images: Images, device: str, workers: int, share: float) -> float:
    """The same recipe as most programs have it: float32 images on the CPU, a DataLoader, one step after the other."""
    rows = torch.arange(int(share * len(images)))
    pixels, labels = images.to("cpu").batch_of(rows)
    loader = DataLoader(TensorDataset(pixels, labels), 128, shuffle=True, num_workers=workers, pin_memory=device == "cuda")
    model = fresh(name, device).to(memory_format=torch.contiguous_format).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def epoch() -> float:
        started = time.perf_counter()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / share

    for x, y in loader:  # warm
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        break
    return epoch()


def together(name: str, images: Images, device: str, count: int, precision: str) -> float:
    """Seconds an epoch and network when so many train at once."""
    clock = Clock(device)
    trainings = [Training(fresh(name, device), images, tuning(3, precision)) for _ in range(count)]
    trainings[-1] = Training(trainings[-1].model, images, tuning(3, precision), clock.tick)
    train_together(trainings)
    return statistics.mean(clock.epochs[1:]) / count * EPOCH / len(images)


def measured(name: str, options: argparse.Namespace, images: Images) -> dict[str, object]:
    def say(variant: str, seconds: float) -> float:
        print(f"{name:12} {variant:28} {seconds:8.3f} s an epoch", file=sys.stderr, flush=True)
        return seconds

    variants: dict[str, Callable[[], list[float]]] = {
        "float32": lambda: ours(name, images, options.device, options.rounds, "float32"),
        "bfloat16": lambda: ours(name, images, options.device, options.rounds, "bfloat16"),
        "bfloat16, without our kernels": lambda: without_kernels(name, images, options.device, options.rounds),
        LOADER: lambda: [loader_loop(name, images, options.device, options.workers, options.loader_share)],
    }
    if options.compile:
        variants["bfloat16, torch.compile"] = lambda: ours(name, images, options.device, options.rounds, "bfloat16", compiled=True)
    variants = {variant: call for variant, call in variants.items() if variant in (*options.variants, "bfloat16, torch.compile")}
    found: dict[str, object] = {}
    for variant, call in variants.items():
        times = [seconds * EPOCH / len(images) for seconds in call()]
        say(variant, statistics.median(times))
        found[variant] = times
    if name == options.networks[0]:
        found["together, bfloat16"] = {
            count: say(f"{count} together, bfloat16", together(name, images, options.device, count, "bfloat16"))
            for count in options.together
        }
    return found


def main() -> None:
    options = arguments()
    images = synthetic(options.images, options.device)
    about = {"torch": torch.__version__, "python": platform.python_version(), "images": options.images, "batch_size": 128}
    about["device"] = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
    results = {}
    for name in options.networks:
        results[name] = measured(name, options, images)
        if options.json:
            options.json.write_text(json.dumps({**about, "seconds_an_epoch": results}, indent=1) + "\n")
    for name, found in results.items():
        medians = {variant: statistics.median(times) for variant, times in found.items() if isinstance(times, list)}
        slow = max(medians.values())
        print(f"{name:12} " + "  ".join(f"{variant} {value:.3f} s ({slow / value:.1f}x)" for variant, value in medians.items()))


if __name__ == "__main__":
    main()
