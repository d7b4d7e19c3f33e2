"""Read MNIST and Fashion-MNIST from idx files, plain or gzipped: `MNIST/raw/`, `FashionMNIST/raw/`, as torchvision lays them out.

LeCun, Cortes and Burges 1998; Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747: 28×28 grey images, 60,000 to train and 10,000 to test.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expunge.vision.datasets.files import Place, gunzipped, gunzipped_start, md5
from expunge.vision.datasets.images import ImageSet, image_set

CLASSES = 10
LARGEST = 2**28  # bytes of a file, unpacked; the train images have 47 MB
BYTES = 8  # the code for unsigned bytes, the third byte of an idx file


@dataclass(frozen=True)
class Idx:
    """One dataset of this form; `published` is the MD5 of each file, unpacked."""

    name: str
    folder: str
    names: tuple[str, ...]
    published: Mapping[str, str]


MNIST = Idx(
    "mnist",
    "MNIST/raw",
    tuple(str(digit) for digit in range(CLASSES)),
    {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)
FASHION_MNIST = Idx(
    "fashion-mnist",
    "FashionMNIST/raw",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)


def read(root: Path, which: Idx, verify: bool = True) -> ImageSet:
    """Both parts; the names of the classes are not in the files."""
    place = Place(which.name, root)
    train, test = (_part(place, which, part, verify) for part in ("train", "t10k"))
    return image_set(train, test, which.names)


def _part(place: Place, which: Idx, part: str, verify: bool) -> tuple[Tensor, Tensor]:
    folder = place.root / which.folder
    images = _file(place, which, folder / f"{part}-images-idx3-ubyte", 3, verify)
    path = folder / f"{part}-labels-idx1-ubyte"
    labels = _file(place, which, path, 1, verify).long()
    if len(images) != len(labels):
        raise place.broken(path, f"must hold a label for each of the {len(images)} images", len(labels))
    place.check_labels(path, labels, CLASSES)
    return images.unsqueeze(1), labels


def _file(place: Place, which: Idx, path: Path, dimensions: int, verify: bool) -> Tensor:
    """An idx file: two zero bytes, the type, the number of dimensions, the sizes as big-endian 32-bit numbers, the values.

    Of a packed one no more is unpacked than it says it holds.
    """
    packed = path.with_name(f"{path.name}.gz")
    source = packed if packed.exists() and not path.exists() else path
    content, start = place.read_bytes(source, LARGEST), 4 + 4 * dimensions
    sizes = _sizes(place, source, gunzipped_start(content, start) if source is packed else content[:start], dimensions)
    if source is packed:
        try:
            content = gunzipped(content, start + math.prod(sizes))
        except ValueError as error:
            raise place.broken(source, "must be a whole gzip file of what it says it holds", error) from error
    if verify and (digest := md5(content)) != which.published[path.name]:
        raise place.not_published(source, which.published[path.name], digest)
    if len(content) - start != math.prod(sizes):
        raise place.broken(source, f"must hold {' × '.join(map(str, sizes))} bytes, as it says", len(content) - start)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(sizes)


def _sizes(place: Place, path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    if len(header) < 4 + 4 * dimensions or header[:4] != bytes([0, 0, BYTES, dimensions]):
        raise place.broken(path, f"must begin as an idx file of bytes in {dimensions} dimensions", header[:4].hex())
    sizes = struct.unpack(f">{dimensions}I", header[4:])
    if not 0 < math.prod(sizes) <= LARGEST:
        raise place.broken(path, f"must hold at most {LARGEST} bytes, and not none", " × ".join(map(str, sizes)))
    return sizes
