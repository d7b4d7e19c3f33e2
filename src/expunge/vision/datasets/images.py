"""Keep images as bytes and return them as normalised batches; every dataset reader returns these classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expunge.errors import InputError
from expunge.runtime.modes import generator
from expunge.validate import check_number


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Samples ((pixels/255 − mean)/std as float32 (C, H, W), label), read a whole batch at a time.

    `pixels` (N, C, H, W) stay uint8, a quarter of the memory; `batch_of(rows)` normalises on the device they live on, where `to(device)`
    puts them once. Mean and standard deviation of each channel are by default those of the images themselves.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        if pixels.dtype != torch.uint8 or pixels.dim() != 4 or not len(pixels):
            raise InputError("pixels", "must be uint8 of shape (N, C, H, W), N at least 1", f"{pixels.dtype} {tuple(pixels.shape)}")
        if labels.dtype != torch.int64 or labels.shape != pixels.shape[:1]:
            raise InputError("labels", f"must be int64 of shape ({len(pixels)},)", f"{labels.dtype} {tuple(labels.shape)}")
        if mean is None or std is None:
            own_mean, own_std = channel_statistics(pixels)
            mean, std = own_mean if mean is None else mean, own_std if std is None else std
        self.pixels, self.labels = pixels, labels
        self.mean, self.std = tuple(mean), tuple(std)
        if not len(self.mean) == len(self.std) == pixels.shape[1] or min(self.std) <= 0:
            raise InputError("mean, std", f"must hold {pixels.shape[1]} numbers each, the second positive", (self.mean, self.std))
        self._scale = torch.tensor([1 / (255 * std) for std in self.std], device=pixels.device).view(-1, 1, 1)
        self._shift = torch.tensor([-mean / std for mean, std in zip(self.mean, self.std, strict=True)], device=pixels.device).view(
            -1, 1, 1
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.normalised(self.pixels[index]), self.labels[index]

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The samples of these rows; `batches.as_batches` reads datasets by this."""
        chosen = rows.to(self.labels.device)
        return self.normalised(self.pixels[chosen]), self.labels[chosen]

    def normalised(self, pixels: Tensor) -> Tensor:
        """Bytes (..., C, H, W) as these images are normalised, for instance after augmentation."""
        return pixels.float().mul_(self._scale).add_(self._shift)

    @property
    def targets(self) -> Tensor:
        """The labels, where torchvision's datasets keep them."""
        return self.labels

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All it holds, where a TensorDataset has it: the fingerprint `contents.data_digest` is taken over it."""
        return self.pixels, self.labels

    def take(self, rows: Tensor) -> Images:
        """A copy of some of the images, normalised in the same way."""
        chosen = rows.to(self.labels.device)
        return Images(self.pixels[chosen], self.labels[chosen], self.mean, self.std)

    def to(self, device: torch.device | str) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device), self.mean, self.std)


@dataclass(frozen=True)
class ImageSet:
    """A dataset as published: train and test images, both normalised by the mean and deviation of the train images."""

    train: Images
    test: Images
    names: tuple[str, ...]
    """Of the classes, in the order of the labels."""

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def channels(self) -> int:
        return self.train.pixels.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.train.pixels.shape[2:]
        return height, width

    @property
    def mean(self) -> tuple[float, ...]:
        return self.train.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.train.std

    def to(self, device: torch.device | str) -> ImageSet:
        return ImageSet(self.train.to(device), self.test.to(device), self.names)


def image_set(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], names: Sequence[str]) -> ImageSet:
    """(pixels, labels) of the two parts, put together."""
    images = Images(*train)
    return ImageSet(images, Images(*test, images.mean, images.std), tuple(names))


def channel_statistics(pixels: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every channel in [0, 1], from the counts of the 256 values: exact whatever the number of images.

    A channel of one value only gets the deviation 1, so that it can be divided by.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(pixels.shape[1]):
        counts = torch.bincount(pixels[:, channel].flatten(), minlength=256).double().cpu()
        mean = values @ counts / counts.sum()
        variance = (values - mean).square() @ counts / counts.sum()
        means.append(float(mean))
        deviations.append(float(variance.sqrt()) or 1.0)
    return means, deviations


class Split(NamedTuple):
    """Two parts that share no image."""

    train: Images
    validation: Images


def split(images: Images, fraction: float = 0.1, seed: int = 0) -> Split:
    """Keep `fraction` of every class apart for choosing settings; both parts stay in the order of the data."""
    check_number("fraction", fraction, 0, 1, ends="()")
    kept = stratified(images.labels, fraction, seed)
    if not kept.any() or kept.all():
        raise InputError("fraction", f"must leave images in both parts of {len(images)}", fraction)
    return Split(*(images.take(torch.nonzero(chosen).flatten()) for chosen in (~kept, kept)))


def stratified(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """A mask of round(fraction · count) rows of every class, drawn by the seed."""
    here = labels.cpu()
    numbers = generator(seed)
    chosen = torch.zeros(len(here), dtype=torch.bool)
    for label in torch.unique(here).tolist():
        rows = torch.nonzero(here == label).flatten()
        chosen[rows[torch.randperm(len(rows), generator=numbers)[: round(fraction * len(rows))]]] = True
    return chosen
