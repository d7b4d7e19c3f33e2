"""Read any folder of class folders of pictures: `train/CLASS/*` and `test/CLASS/*` (or `val/`), or `CLASS/*` alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from expunge.errors import InputError
from expunge.storage.documents import read_plain
from expunge.vision.datasets import pictures
from expunge.vision.datasets.images import ImageSet, image_set, stratified

TEST_PARTS = ("test", "val")


def read(path: Path, size: int | None = None, test_fraction: float = 0.2, seed: int = 0) -> ImageSet:
    """Labels in the order of the sorted folder names. `size` resizes to a square; pictures of one size need none.

    Where there is no train folder, `test_fraction` of every class becomes the test part, drawn by the seed.
    """
    if not path.is_dir():
        raise InputError("data", "must be a folder of class folders of pictures", path)
    if (path / "train").is_dir():
        names = _classes(path / "train")
        tests = [path / part for part in TEST_PARTS if (path / part).is_dir()]
        if not tests:
            raise InputError("data", f"{path} has a train folder and must have one called {' or '.join(TEST_PARTS)}")
        return image_set(_part(path / "train", names, size), _part(tests[0], names, size), names)
    if not 0 < test_fraction < 1:
        raise InputError("test_fraction", "must be in (0, 1)", test_fraction)
    names = _classes(path)
    pixels, labels = _part(path, names, size)
    chosen = stratified(labels, test_fraction, seed)
    if not chosen.any():
        raise InputError("test_fraction", f"must leave pictures for the test part, out of {len(labels)}", test_fraction)
    return image_set((pixels[~chosen], labels[~chosen]), (pixels[chosen], labels[chosen]), names)


def _classes(folder: Path) -> list[str]:
    names = sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not names:
        raise InputError("data", "must hold class folders of pictures", folder)
    return names


def _part(folder: Path, names: list[str], size: int | None) -> tuple[Tensor, Tensor]:
    unknown = sorted(set(_classes(folder)) - set(names))
    if unknown:
        raise InputError("data", f"every class of {folder} must be in train too", unknown[0])
    labels: dict[str, int] = {}
    for label, name in enumerate(names):
        files = sorted(file for file in (folder / name).iterdir() if pictures.is_picture(file.name))
        if not files:
            raise InputError("data", f"{folder / name} must hold pictures ({' '.join(pictures.SUFFIXES)})")
        labels |= {str(file): label for file in files}
    return pictures.decoded(list(labels), _content, size), torch.tensor(list(labels.values()))


def _content(name: str) -> bytes:
    try:
        return read_plain(name, pictures.LARGEST)
    except OSError as error:
        raise InputError("data", f"{name} must be there and readable", error.strerror) from error
    except ValueError as error:
        raise InputError("data", f"{name}: must be a picture", error) from error
