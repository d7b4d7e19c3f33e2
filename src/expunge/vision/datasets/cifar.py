"""Read CIFAR-10 and CIFAR-100, python version: `cifar-10-batches-py/`, `cifar-100-python/`.

A. Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html: 32×32 colour images, 50,000 to train and 10,000 to test.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from expunge.vision.datasets import pickles
from expunge.vision.datasets.files import Place, md5
from expunge.vision.datasets.images import ImageSet, image_set

SHAPE = (3, 32, 32)
LARGEST = 2**28  # bytes of a file; CIFAR-100's train has 155 MB
LARGEST_META = 2**20


@dataclass(frozen=True)
class Cifar:
    """One of the two: its files, its keys, and what the files must be."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels_key: str
    names_key: str
    classes: int
    published: Mapping[str, str]
    """MD5 of the files as published."""
    content: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the pixels and labels in them, for files that hold the same in another pickle."""


CIFAR10 = Cifar(
    "cifar10",
    "cifar-10-batches-py",
    tuple(f"data_batch_{number}" for number in range(1, 6)),
    ("test_batch",),
    "batches.meta",
    "labels",
    "label_names",
    10,
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    {
        "data_batch_1": "ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114",
        "data_batch_2": "350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac",
        "data_batch_3": "a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722",
        "data_batch_4": "133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97",
        "data_batch_5": "eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87",
        "test_batch": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
    },
)
CIFAR100 = Cifar(
    "cifar100",
    "cifar-100-python",
    ("train",),
    ("test",),
    "meta",
    "fine_labels",
    "fine_label_names",
    100,
    {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
)


def read(root: Path, which: Cifar, verify: bool = True) -> ImageSet:
    """Both parts and the names of the classes."""
    place, folder = Place(which.name, root), root / which.folder
    train, test = (_joined([_batch(place, which, folder / name, verify) for name in names]) for names in (which.train, which.test))
    return image_set(train, test, _names(place, which, folder / which.meta))


def _joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([pixels for pixels, _ in batches]), torch.cat([labels for _, labels in batches])


def _batch(place: Place, which: Cifar, path: Path, verify: bool) -> tuple[Tensor, Tensor]:
    content = place.read_bytes(path, LARGEST)
    digest = md5(content) if verify else ""
    published = not verify or digest == which.published[path.name]
    if not published and path.name not in which.content:
        raise place.not_published(path, which.published[path.name], digest)
    batch = _unpickled(place, path, content)
    data, labels = batch.get("data"), batch.get(which.labels_key)
    if not isinstance(data, numpy.ndarray) or data.ndim != 2 or data.shape[1] != math.prod(SHAPE) or not len(data):
        raise place.broken(path, f"data must be rows of {math.prod(SHAPE)} bytes", getattr(data, "shape", type(data).__name__))
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise place.broken(path, f"{which.labels_key} must be a list of {len(data)} whole numbers")
    if wrong := [label for label in labels if not 0 <= label < which.classes]:
        raise place.broken(path, f"labels must be in [0, {which.classes})", wrong[0])
    targets = torch.tensor(labels)
    if not published and content_digest(data, targets) != which.content[path.name]:
        raise place.not_published(path, which.published[path.name], digest)
    return torch.from_numpy(data.copy()).view(-1, *SHAPE), targets


def content_digest(data: numpy.ndarray[Any, Any], labels: Tensor) -> str:
    """SHA-256 over the pixels, row by row, and then the labels, a byte each."""
    digest = hashlib.sha256(numpy.ascontiguousarray(data).data)
    digest.update(labels.to(torch.uint8).numpy().data)
    return digest.hexdigest()


def _names(place: Place, which: Cifar, path: Path) -> list[str]:
    names = _unpickled(place, path, place.read_bytes(path, LARGEST_META)).get(which.names_key)
    if not isinstance(names, list) or len(names) != which.classes or not all(isinstance(name, bytes) for name in names):
        raise place.broken(path, f"{which.names_key} must be {which.classes} names")
    return [name.decode("utf-8", "replace") for name in names]


def _unpickled(place: Place, path: Path, content: bytes) -> dict[str, Any]:
    try:
        return pickles.read(content)
    except pickle.UnpicklingError as error:
        raise place.broken(path, "must be a whole pickle of numbers, text and byte arrays", error) from error
