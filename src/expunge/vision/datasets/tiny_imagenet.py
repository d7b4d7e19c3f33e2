"""Tiny-ImageNet, as a folder or the zip it comes in: `tiny-imagenet-200/`, `tiny-imagenet-200.zip`.

Stanford CS231n, http://cs231n.stanford.edu/: 64×64 pictures, 200 classes of 500 to train and 50 to validate, which serve as test here (the
test pictures have no published labels). A part of the classes in the same layout is read too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.vision.datasets import files, pictures
from expunge.vision.datasets.images import ImageSet, image_set

LARGEST = 16 * 2**20  # bytes of a member of the zip; the largest text file has 2.6 MB


@dataclass(frozen=True)
class TinyImageNet:
    """What the files must be: the MD5 of the zip and the pictures of each class."""

    published: str = "90528d7ca1a48142e341f4ef8d21d0de"
    train: int = 500
    validation: int = 50
    name: str = "tiny-imagenet"
    folder: str = "tiny-imagenet-200"
    size: int = 64


TINY_IMAGENET = TinyImageNet()


class Source(NamedTuple):
    """A folder or a zip: the names of its files below tiny-imagenet-200/, and what is in them."""

    path: Path
    names: list[str]
    content: Callable[[str], bytes]


def read(root: Path, which: TinyImageNet = TINY_IMAGENET, verify: bool = True, size: int | None = None) -> ImageSet:
    """Train and validation pictures; labels in the order of the sorted class identifiers. `size` resizes (the paper's release: 32)."""
    with _source(root, which, verify) as source:
        classes = sorted(_text(source, "wnids.txt", which, root).split())
        label = {identifier: number for number, identifier in enumerate(classes)}
        train = _train(source, label, which, root)
        test = _validation(source, label, which, root)
        for part, expected in ((train, which.train), (test, which.validation)):
            counts = torch.bincount(torch.tensor(list(part.values())), minlength=len(classes))
            wrong = torch.nonzero(counts != expected if verify else counts == 0).flatten().tolist()
            if wrong:
                rule = f"class {classes[wrong[0]]} must have {expected if verify else 'at least 1'} pictures in {next(iter(part)).split('/')[0]}"
                raise files.broken(source.path, which.name, root, rule, int(counts[wrong[0]]))
        words = dict(line.split("\t", 1) for line in _text(source, "words.txt", which, root).splitlines() if "\t" in line)
        parts = [_decoded(source, part, which, root, size) for part in (train, test)]
    return image_set(parts[0], parts[1], [words.get(identifier, identifier) for identifier in classes])


@contextmanager
def _source(root: Path, which: TinyImageNet, verify: bool) -> Iterator[Source]:
    folder, archive = root / which.folder, root / f"{which.folder}.zip"
    if folder.is_dir():
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        yield Source(folder, names, lambda name: files.read_bytes(folder / name, which.name, root))
        return
    if not archive.is_file():
        raise files.missing(folder, which.name, root)
    if verify and (found := files.md5_of(archive)) != which.published:
        raise files.not_published(archive, which.name, root, which.published, found)
    try:
        with zipfile.ZipFile(archive) as file:
            members = [member for member in file.infolist() if not member.is_dir()]
            for member in members:
                if files.climbs(member.filename) or member.file_size > LARGEST:
                    rule = f"must hold files below {which.folder} of at most {LARGEST} bytes"
                    raise files.broken(archive, which.name, root, rule, f"{member.filename}, {member.file_size} bytes")
            inside = f"{which.folder}/"
            names = sorted(member.filename.removeprefix(inside) for member in members if member.filename.startswith(inside))
            yield Source(archive, names, lambda name: file.read(inside + name))
    except zipfile.BadZipFile as error:
        raise files.broken(archive, which.name, root, "must be a whole zip file", error) from error


def _text(source: Source, name: str, which: TinyImageNet, root: Path) -> str:
    if name not in source.names:
        raise files.missing(source.path / name, which.name, root)
    return source.content(name).decode("utf-8", "replace")


def _train(source: Source, label: dict[str, int], which: TinyImageNet, root: Path) -> dict[str, int]:
    """The label of every picture train/CLASS/images/NAME."""
    found = {}
    for name in source.names:
        match name.split("/"):
            case ["train", identifier, "images", picture] if picture.lower().endswith(pictures.SUFFIXES):
                if identifier not in label:
                    raise files.broken(source.path, which.name, root, "every folder of train must be in wnids.txt", identifier)
                found[name] = label[identifier]
    if not found:
        raise files.missing(source.path / "train/CLASS/images", which.name, root)
    return found


def _validation(source: Source, label: dict[str, int], which: TinyImageNet, root: Path) -> dict[str, int]:
    """The label of every picture val/images/NAME, from the lines NAME, class, box of val_annotations.txt."""
    found, there = {}, set(source.names)
    for line in _text(source, "val/val_annotations.txt", which, root).splitlines():
        picture, identifier = [*line.split("\t"), ""][:2]
        name = f"val/images/{picture}"
        if identifier not in label:
            raise files.broken(source.path / "val/val_annotations.txt", which.name, root, "every class must be in wnids.txt", identifier)
        if name not in there:
            raise files.missing(source.path / name, which.name, root)
        found[name] = label[identifier]
    if not found:
        raise files.broken(source.path / "val/val_annotations.txt", which.name, root, "must name pictures")
    return found


def _decoded(source: Source, part: dict[str, int], which: TinyImageNet, root: Path, size: int | None) -> tuple[Tensor, Tensor]:
    pixels = pictures.decoded(list(part), source.content, size)
    expected = which.size if size is None else size
    if pixels.shape[2:] != (expected, expected):
        raise files.broken(source.path, which.name, root, f"pictures must be {expected}×{expected}", tuple(pixels.shape[2:]))
    return pixels, torch.tensor(list(part.values()))
