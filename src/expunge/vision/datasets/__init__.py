"""Read image datasets from the files as they are published; all are returned as an `ImageSet`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from expunge.errors import InputError
from expunge.vision.datasets import cifar, digits, folder, idx, tiny_imagenet
from expunge.vision.datasets.files import VARIABLE, data_folder
from expunge.vision.datasets.images import Images, ImageSet, Split, image_set, split

READERS: dict[str, Callable[..., ImageSet]] = {
    "cifar10": partial(cifar.read, which=cifar.CIFAR10),
    "cifar100": partial(cifar.read, which=cifar.CIFAR100),
    "mnist": partial(idx.read, which=idx.MNIST),
    "fashion-mnist": partial(idx.read, which=idx.FASHION_MNIST),
    "tiny-imagenet": tiny_imagenet.read,
}
DIGITS = "digits"


def load(name: str, data: str | os.PathLike[str] | None = None, verify: bool = True, size: int | None = None) -> ImageSet:
    """A dataset by name, or a folder of class folders of pictures by its path.

    Files are searched for in `data`, else in EXPUNGE_DATA, else in ./data, in their usual layout. `verify` compares them with the published
    checksums; shapes and labels are checked in any case. `size` resizes pictures (Tiny-ImageNet and folders).
    """
    resized = {} if size is None else {"size": size}
    if resized and (name == DIGITS or (name in READERS and name != "tiny-imagenet")):
        raise InputError("size", "is for pictures alone: tiny-imagenet, or a folder of them", size)
    if size is not None and size < 1:
        raise InputError("size", "must be at least 1", size)
    if name == DIGITS:
        return embedded()
    if name in READERS:
        return READERS[name](data_folder(data), verify=verify, **resized)
    if Path(name).is_dir():
        return folder.read(Path(name), **resized)
    raise InputError("name", f"must be one of {', '.join([DIGITS, *READERS])}, or a folder of class folders of pictures", name)


def embedded() -> ImageSet:
    """The digits inside the package: the train and validation parts of `digits(seed=0)` to train, its test part to test."""
    images, labels = digits.raw()
    pixels = (images * 15).to(torch.uint8).unsqueeze(1)  # values 0 to 16
    train, validation, test = digits.parts(labels, seed=0)
    kept = torch.cat([train, validation])
    return image_set((pixels[kept], labels[kept]), (pixels[test], labels[test]), [str(digit) for digit in range(digits.CLASSES)])


__all__ = [
    "READERS",
    "VARIABLE",
    "ImageSet",
    "Images",
    "Split",
    "data_folder",
    "load",
    "split",
]
