"""CIFAR-10's training images, cut into a training and a validation part; the test set is never read here."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy
import torch

from expunge.vision.datasets import Images, split

FRACTION = 0.1  # of every class, for choosing


def load(folder: Path, device: torch.device, limit: int | None = None) -> tuple[Images, Images]:
    """(train, validation) from ten sheets of 50 × 100 pictures, or from CIFAR-10's own files; `limit` takes the first so many."""
    sheets = [number for number in range(1, 11) if (folder / f"{number}.webp").exists()]
    parts = [_sheet(folder, number) for number in sheets] or [_batch(folder, number) for number in range(1, 6)]
    pixels = torch.from_numpy(numpy.concatenate([pixels for pixels, _ in parts]))[:limit]
    labels = torch.tensor([label for _, labels in parts for label in labels])[:limit]
    parted = split(Images(pixels.contiguous(), labels), FRACTION)
    return parted.train.to(device), parted.validation.to(device)


def _sheet(folder: Path, number: int) -> tuple[numpy.ndarray, list[int]]:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    sheet = numpy.asarray(Image.open(folder / f"{number}.webp"))
    pixels = sheet.reshape(50, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(5000, 3, 32, 32)
    return numpy.ascontiguousarray(pixels), json.loads((folder / f"{number}.json").read_text())


def _batch(folder: Path, number: int) -> tuple[numpy.ndarray, list[int]]:
    content = pickle.loads((folder / f"data_batch_{number}").read_bytes(), encoding="bytes")
    return numpy.asarray(content[b"data"]).reshape(10000, 3, 32, 32), list(content[b"labels"])
