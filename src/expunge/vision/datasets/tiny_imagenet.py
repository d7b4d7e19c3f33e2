"""Read Tiny-ImageNet, as a folder or the zip it comes in: `tiny-imagenet-200/`, `tiny-imagenet-200.zip`.

Stanford CS231n, http://cs231n.stanford.edu/: 64×64 pictures, 200 classes of 500 to train and 50 to validate, which serve as test here (the
test pictures have no published labels). A part of the classes in the same layout is read too.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.storage.documents import excerpt
from expunge.vision.datasets import pictures
from expunge.vision.datasets.files import Place, climbs, md5_of
from expunge.vision.datasets.images import ImageSet, image_set

LARGEST = 16 * 2**20  # bytes of a file; the largest text file has 2.6 MB
LARGEST_LIST = 2**16  # bytes of the list of classes, of ten each
MEMBERS = 2**18  # of the zip; it has about 120,600
PIXELS = 2**20  # of a picture, which should have 64×64
ENCRYPTED = 1  # a bit of a member's flags


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
    content: Callable[..., bytes]
    """By a name, and the most bytes it may have."""


def read(root: Path, which: TinyImageNet = TINY_IMAGENET, verify: bool = True, size: int | None = None) -> ImageSet:
    """Train and validation pictures; labels in the order of the sorted class identifiers. `size` resizes (the paper's release: 32)."""
    place = Place(which.name, root)
    with _source(place, which, verify) as source:
        classes = sorted(_text(place, source, "wnids.txt", LARGEST_LIST).split())
        label = {identifier: number for number, identifier in enumerate(classes)}
        if not label or len(label) != len(classes):
            raise place.broken(source.path / "wnids.txt", "must name every class once", f"{len(classes)} names of {len(label)} classes")
        train, test = _train(place, source, label), _validation(place, source, label)
        for part, folder, expected in ((train, "train", which.train), (test, "val", which.validation)):
            counts = torch.bincount(torch.tensor(list(part.values())), minlength=len(classes))
            for wrong in torch.nonzero(counts != expected if verify else counts == 0).flatten().tolist():
                rule = f"class {classes[wrong]} must have {expected if verify else 'at least 1'} pictures in {folder}"
                raise place.broken(source.path, rule, int(counts[wrong]))
        words = dict(line.split("\t", 1) for line in _text(place, source, "words.txt").splitlines() if "\t" in line)
        parts = [_decoded(place, source, part, which, size) for part in (train, test)]
    return image_set(parts[0], parts[1], [words.get(identifier, identifier) for identifier in classes])


@contextmanager
def _source(place: Place, which: TinyImageNet, verify: bool) -> Iterator[Source]:
    folder, archive = place.root / which.folder, place.root / f"{which.folder}.zip"
    if folder.is_dir():
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        yield Source(folder, names, lambda name, largest=LARGEST: place.read_bytes(folder / name, largest))
        return
    if not archive.is_file():
        raise place.missing(folder)
    if verify and (digest := md5_of(archive)) != which.published:
        raise place.not_published(archive, which.published, digest)
    with _opened(place, archive) as file:
        members = _members(place, archive, file, f"{which.folder}/")
        yield Source(archive, sorted(members), lambda name, largest=LARGEST: _content(place, archive, file, members[name], largest))


def _opened(place: Place, archive: Path) -> zipfile.ZipFile:
    try:
        if _entries(archive) > MEMBERS:
            raise zipfile.BadZipFile(f"it has more than {MEMBERS} members")
        return zipfile.ZipFile(archive)
    except Exception as error:  # a broken one can fail in any way
        raise place.broken(archive, "must be a whole zip file", excerpt(str(error))) from error


def _entries(archive: Path) -> int:
    """How many entries its directory can have at most, by their signature: each takes much more memory than room in the file."""
    count, rest = 0, b""
    with archive.open("rb") as file:
        while piece := file.read(2**20):
            piece = rest + piece
            count += piece.count(zipfile.stringCentralDir)  # type: ignore[attr-defined]
            rest = piece[-3:]
    return count


def _members(place: Place, archive: Path, file: zipfile.ZipFile, inside: str) -> dict[str, zipfile.ZipInfo]:
    """By their names below `inside`. Nothing is ever written from them, yet an archive that tries to climb out is not to be trusted."""
    members = {}
    for member in file.infolist():
        if member.filename.endswith("/"):  # a folder; its own is_dir fails for a name that is empty
            continue
        if climbs(member.filename) or member.file_size > LARGEST or _is_link(member):
            rule = f"must hold files of at most {LARGEST} bytes that lie inside it, and no links"
            raise place.broken(archive, rule, f"{excerpt(member.filename)}, {member.file_size} bytes")
        if member.flag_bits & ENCRYPTED or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            rule = "must hold files that are not encrypted, and packed by deflate or not at all"
            raise place.broken(archive, rule, excerpt(member.filename))
        if member.filename.startswith(inside):
            members[member.filename.removeprefix(inside)] = member
    return members


def _is_link(member: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(member.external_attr >> 16)


def _content(place: Place, archive: Path, file: zipfile.ZipFile, member: zipfile.ZipInfo, largest: int) -> bytes:
    """Read by its size: without it zipfile unpacks all there is before it checks the size."""
    try:
        if member.file_size > largest:
            raise zipfile.BadZipFile(f"it has {member.file_size} bytes, more than {largest}")
        with file.open(member) as opened:
            content = opened.read(member.file_size)
        if len(content) != member.file_size:
            raise zipfile.BadZipFile(f"it ends after {len(content)} of {member.file_size} bytes")
    except Exception as error:
        raise place.broken(archive, f"must be a whole zip file; {excerpt(member.filename)} is not", excerpt(str(error))) from error
    return content


def _text(place: Place, source: Source, name: str, largest: int = LARGEST) -> str:
    if name not in source.names:
        raise place.missing(source.path / name)
    return source.content(name, largest).decode("utf-8", "replace")


def _train(place: Place, source: Source, label: dict[str, int]) -> dict[str, int]:
    """The label of every picture train/CLASS/images/NAME."""
    labels = {}
    for name in source.names:
        match name.split("/"):
            case ["train", identifier, "images", picture] if pictures.is_picture(picture):
                if identifier not in label:
                    raise place.broken(source.path, "every folder of train must be in wnids.txt", identifier)
                labels[name] = label[identifier]
    if not labels:
        raise place.missing(source.path / "train/CLASS/images")
    return labels


def _validation(place: Place, source: Source, label: dict[str, int]) -> dict[str, int]:
    """The label of every picture val/images/NAME, from the lines NAME, class, box of val_annotations.txt."""
    labels: dict[str, int] = {}
    there = set(source.names)
    annotations = source.path / "val/val_annotations.txt"
    for line in _text(place, source, "val/val_annotations.txt").split("\n"):
        if not line.strip():
            continue
        picture, identifier = [*line.rstrip("\r").split("\t"), ""][:2]
        name = f"val/images/{picture}"
        if identifier not in label:
            raise place.broken(annotations, "every class must be in wnids.txt", excerpt(identifier))
        if name not in there:
            raise place.missing(source.path / excerpt(name))
        if labels.setdefault(name, label[identifier]) != label[identifier]:
            raise place.broken(annotations, "a picture must have one class", excerpt(picture))
    if not labels:
        raise place.broken(annotations, "must name pictures")
    return labels


def _decoded(place: Place, source: Source, part: dict[str, int], which: TinyImageNet, size: int | None) -> tuple[Tensor, Tensor]:
    pixels = pictures.decoded(list(part), source.content, size, PIXELS)
    expected = which.size if size is None else size
    if pixels.shape[2:] != (expected, expected):
        raise place.broken(source.path, f"pictures must be {expected}×{expected}", tuple(pixels.shape[2:]))
    return pixels, torch.tensor(list(part.values()))
