"""Train networks of the zoo by a recipe: several side by side, their state kept after every epoch, their accuracies on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from expunge.artifacts import save_tensors, weights_digest
from expunge.errors import InputError
from expunge.metrics import accuracy
from expunge.modes import seeded
from expunge.tuning import Training, train_together
from expunge.vision.augmentation import Augmentation
from expunge.vision.datasets import Images
from expunge.vision.networks import NETWORKS
from expunge.vision.recipes import Recipe

EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Job:
    """One network to train: its data, and the seed of its weights and of the order of its samples."""

    name: str
    data: Dataset[Any]
    seed: int


@dataclass
class Trained:
    """A network at the end of its training; `curve` is (epoch, accuracies) on the watched data."""

    job: Job
    model: nn.Module
    curve: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return weights_digest(self.model)


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


def build(network: str, classes: int, channels: int, seed: int, device: torch.device) -> nn.Module:
    """A network of the zoo with fresh weights by the seed; channels last on CUDA, where convolutions are faster that way."""
    if network not in NETWORKS:
        raise InputError("network", f"must be one of {', '.join(NETWORKS)}", network)
    with seeded(seed, torch.device("cpu")):
        model = NETWORKS[network](classes, channels).to(device)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model  # type: ignore[call-overload]


def train_networks(
    network: str,
    classes: int,
    channels: int,
    jobs: Sequence[Job],
    recipe: Recipe,
    *,
    device: torch.device,
    precision: Literal["float32", "bfloat16"] = "float32",
    watch: Mapping[str, Any] | None = None,
    every: int = 1,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> list[Trained]:
    """Train one network a job, all at once; data on the device make a step one CUDA graph.

    `watch` names data whose accuracies are noted after `every` so many epochs and at the end. In the folder `out` each job keeps its state
    in `NAME.training.safetensors`, from which a training that was stopped goes on, and its weights in `NAME.safetensors` when it is done.
    """
    if not jobs or len({job.name for job in jobs}) != len(jobs):
        raise InputError("jobs", "must be one or more, of different names", [job.name for job in jobs])
    trained = [Trained(job, build(network, classes, channels, job.seed, device)) for job in jobs]
    train_together(
        [
            Training(
                each.model,
                each.job.data,
                recipe.tuning(each.job.seed, precision),
                _noting(each, watch or {}, every, recipe.epochs),
                None if out is None else Path(out) / f"{each.job.name}.training.safetensors",
            )
            for each in trained
        ],
        progress=progress,
    )
    for each in trained:
        if not each.curve:  # a training found finished in its file
            _note(each, watch or {}, recipe.epochs)
        if out is not None:
            save_network(Path(out) / f"{each.job.name}.safetensors", each.model, network, classes, channels)
    return trained


def save_network(path: Path, model: nn.Module, network: str, classes: int, channels: int) -> Path:
    """The weights, with what is needed to build the network again."""
    metadata = {"kind": "model", "network": network, "classes": str(classes), "channels": str(channels), "digest": weights_digest(model)}
    return save_tensors(path, model.state_dict(), metadata)


def _noting(trained: Trained, watch: Mapping[str, Any], every: int, epochs: int) -> Any:
    def after_epoch(epoch: int) -> None:
        if epoch % every == 0 or epoch == epochs:
            _note(trained, watch, epoch)

    return after_epoch


def _note(trained: Trained, watch: Mapping[str, Any], epoch: int) -> None:
    found = {name: accuracy(trained.model, data, batch_size=EVALUATION_BATCH) for name, data in watch.items()}
    trained.curve.append((epoch, found))
