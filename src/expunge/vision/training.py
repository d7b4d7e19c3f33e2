"""Train a network on a dataset by its recipe: checkpoints after every epoch, resumed where it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from expunge.artifacts import save_tensors, weights_digest, write_json
from expunge.errors import InputError
from expunge.metrics import accuracy
from expunge.modes import seeded
from expunge.tuning import Training, train_together
from expunge.vision.augmentation import Augmentation
from expunge.vision.datasets import Images, ImageSet
from expunge.vision.networks import NETWORKS
from expunge.vision.recipes import Recipe

EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Trained:
    """A network at the end of its training."""

    model: nn.Module
    seed: int
    test_accuracy: float
    digest: str
    file: Path | None


class Augmented(Dataset[Any]):
    """Images that are cropped and mirrored anew whenever a batch of them is read."""

    def __init__(self, images: Images, augmentation: Augmentation) -> None:
        self.images, self.augmentation = images, augmentation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.batch_of(torch.tensor([index]))
        return image[0], label[0]

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = rows.to(self.images.labels.device)
        pixels = self.augmentation(self.images.pixels[chosen])
        return self.images.normalised(pixels), self.images.labels[chosen]

    @property
    def targets(self) -> Tensor:
        return self.images.labels


def build(network: str, images: ImageSet, seed: int, device: torch.device) -> nn.Module:
    """A network of the zoo with fresh weights by the seed; channels last on CUDA, where convolutions are faster that way."""
    if network not in NETWORKS:
        raise InputError("network", f"must be one of {', '.join(NETWORKS)}", network)
    with seeded(seed, torch.device("cpu")):
        model = NETWORKS[network](images.classes, images.channels)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model  # type: ignore[call-overload]


def train_networks(
    network: str,
    images: ImageSet,
    recipe: Recipe,
    seeds: Sequence[int],
    *,
    device: torch.device,
    precision: str = "float32",
    out: str | os.PathLike[str] | None = None,
    name: str = "",
    data: Dataset[Any] | None = None,
    after_epoch: Callable[[int, int], None] | None = None,
    progress: bool = False,
) -> list[Trained]:
    """One network a seed, side by side: weights, order of the images and augmentation follow the seed.

    `data` replaces the train images (a part of them, a poisoned view). In `out` each seed has `NAME-seedS.training.safetensors` while it
    trains, from where it goes on when it was stopped, and `NAME-seedS.safetensors` when it is done. `after_epoch(seed, epoch)`.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError("seeds", "must be one or more different numbers", list(seeds))
    held = images.to(device)
    source = data if data is not None else Augmented(held.train, Augmentation()) if recipe.augment else held.train
    models = {seed: build(network, images, seed, device) for seed in seeds}
    files = {seed: None if out is None else Path(out) / f"{name or network}-seed{seed}.safetensors" for seed in seeds}
    train_together(
        [
            Training(
                models[seed],
                source,
                recipe.tuning(seed, precision),
                None if after_epoch is None else lambda epoch, seed=seed: after_epoch(seed, epoch),  # type: ignore[misc]
                None if (file := files[seed]) is None else file.with_suffix(".training.safetensors"),
            )
            for seed in seeds
        ],
        progress=progress,
    )
    return [_finished(models[seed], seed, held, files[seed], network) for seed in seeds]


def _finished(model: nn.Module, seed: int, images: ImageSet, file: Path | None, network: str) -> Trained:
    found, digest = accuracy(model, images.test, batch_size=EVALUATION_BATCH), weights_digest(model)
    if file is not None:
        metadata = {"kind": "model", "network": network, "classes": str(images.classes), "channels": str(images.channels), "digest": digest}
        save_tensors(file, model.state_dict(), metadata)
        write_json(file.with_suffix(".json"), {"network": network, "seed": seed, "digest": digest, "test_accuracy": found})
    return Trained(model, seed, found, digest, file)
