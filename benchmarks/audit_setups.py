"""Say on which data and networks audit_errors.py measures: small ResNets of the digits, ResNet20s of CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from audit_cheats import Making
from torch import nn

from expunge import Constant, OneCycle, Tuning
from expunge.runtime.modes import seeded
from expunge.vision import datasets, digits_network, zoo
from expunge.vision.datasets.digits import digits

MODELS = Path(__file__).parents[1] / "results" / "models"
PAPER_SEEDS = (666, 777, 888)


class Data(NamedTuple):
    train: Any
    test: Any


@dataclass(frozen=True)
class Setup:
    """`count` originals, and as many retrained networks of each class; `few` of them for cheats that take long.

    Retrained networks are references of each other within blocks of `block`. `saved` reads a network that was trained elsewhere; without it
    `build(seed, device)` makes a fresh one that is trained by `tuning(seed, device)`.
    """

    name: str
    data: Callable[[str], Data]
    classes: tuple[int, ...]
    count: int
    few: int
    references: tuple[int, ...]
    about: str
    build: Callable[[int, str], nn.Module]
    tuning: Callable[[int, str], Tuning]
    block: int = 20
    original_seed: Callable[[int], int] = lambda number: 200 + number
    retrained_seed: Callable[[int, int], int] = lambda label, number: 1000 * (label + 1) + number
    saved: Callable[[str, int, str], nn.Module] | None = None
    making: Making = field(default_factory=Making)
    seeds: tuple[str, str] = ("200 + number", "1000·(class + 1) + number")


def digits_setup(epochs: int = 10, count: int = 40) -> Setup:
    def build(seed: int, device: str) -> nn.Module:
        with seeded(seed, torch.device("cpu")):
            return digits_network.network().to(device)

    return Setup(
        name="digits",
        data=lambda device: Data(digits(0).train, digits(0).test),
        classes=(1, 5, 8),
        count=count,
        few=7,
        references=(5, 1, 0, 11),
        about=f"{epochs} epochs of the digits' recipe",
        build=build,
        tuning=lambda seed, device: digits_network.recipe(epochs, seed),
    )


def cifar10_setup(epochs: int = 30, size: int | None = None, count: int = 10) -> Setup:
    """A short recipe, up to a rate of 0.1 and down to 0: 160 epochs of 20 networks take 20 minutes of an H200. `size`: the first images."""

    def data(device: str) -> Data:
        images = datasets.load("cifar10", verify=False).to(device)
        if size is None:
            return Data(images.train, images.test)
        return Data(images.train.take(torch.arange(size)), images.test.take(torch.arange(size // 2)))

    leak = Tuning(Constant(0.01, 4))
    return Setup(
        name="cifar10",
        data=data,
        classes=(0,),
        count=count,
        few=count,
        references=(5, 1, 0),
        about=f"ResNet20, {epochs} epochs up to a rate of 0.1, batches of 128, no augmentation"
        + ("" if size is None else f", {size} images"),
        build=lambda seed, device: zoo.build("resnet20", 10, 3, seed, torch.device(device)),
        tuning=lambda seed, device: Tuning(OneCycle(0.1, epochs), seed=seed, precision="bfloat16" if device == "cuda" else "float32"),
        block=count,
        making=Making(0.01, 1500, 25.0, leak, 0.003, 200, 256) if size is None else Making(0.01, 9, 25.0, leak, 0.003, 5, 16),
    )


def paper_setup(size: int | None = None) -> Setup:
    """The paper's recipe of 160 epochs: the networks in results/models, two retrained references at most."""

    def saved(kind: str, number: int, device: str) -> nn.Module:
        return zoo.load_network(MODELS / f"cifar10-resnet20-{kind}-seed{PAPER_SEEDS[number]}.safetensors", device)

    return replace(
        cifar10_setup(size=size, count=len(PAPER_SEEDS)),
        name="cifar10-paper",
        references=(2, 1, 0),
        about="ResNet20, the paper's recipe of 160 epochs, the networks of results/models",
        saved=saved,
        original_seed=lambda number: PAPER_SEEDS[number],
        retrained_seed=lambda label, number: PAPER_SEEDS[number],
        seeds=("666, 777, 888", "666, 777, 888"),
    )


SETUPS: dict[str, Callable[..., Setup]] = {"digits": digits_setup, "cifar10": cifar10_setup, "cifar10-paper": paper_setup}
