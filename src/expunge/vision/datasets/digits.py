"""Read the real handwritten digits inside the package: 1,797 images of 8×8 pixels, ten classes, no download.

The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn ships it: values 0 to 16, here as bytes in `digits.npz`.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from expunge.runtime.modes import generator

CLASSES = 10
SHARES = (0.60, 0.15)  # of every class to train and validation; the rest is test


class Digits(NamedTuple):
    """Three parts that share no image; each holds (images 1×8×8 float32, labels int64)."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset


def raw() -> tuple[Tensor, Tensor]:
    """All images (1797, 8, 8) with values 0 to 16 and their labels, in the order of the source."""
    with files("expunge.vision.datasets").joinpath("digits.npz").open("rb") as file, numpy.load(file) as arrays:
        return torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()


def parts(labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the train, validation and test part, each class shared out by SHARES."""
    numbers = generator(seed)
    rows_of: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in range(CLASSES):
        rows = torch.nonzero(labels == label).flatten()
        shuffled = rows[torch.randperm(len(rows), generator=numbers)]
        train, validation = (round(share * len(rows)) for share in SHARES)
        for part, chosen in zip(rows_of, shuffled.split([train, validation, len(rows) - train - validation]), strict=True):
            part.append(chosen)
    return torch.cat(rows_of[0]), torch.cat(rows_of[1]), torch.cat(rows_of[2])


def digits(seed: int = 0) -> Digits:
    """The digits, scaled to [0, 1], normalised by the train part, and split by class: 60 % train, 15 % validation, 25 % test."""
    images, labels = raw()
    rows = parts(labels, seed)
    scaled = images.float().unsqueeze(1) / 16
    normalised = (scaled - scaled[rows[0]].mean()) / scaled[rows[0]].std()
    return Digits(*(TensorDataset(normalised[part], labels[part]) for part in rows))
