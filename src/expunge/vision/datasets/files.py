"""Find the files of datasets, and raise errors that say what is missing and how to get it."""

from __future__ import annotations

import hashlib
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from expunge.errors import InputError
from expunge.storage.documents import read_plain

VARIABLE = "EXPUNGE_DATA"
PIECE = 2**16
MEMBERS = 4096  # of a gzip file; some programs write one for every 64 kB


def data_folder(data: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the datasets: `data`, else the environment's EXPUNGE_DATA, else ./data."""
    return Path(data if data is not None else os.environ.get(VARIABLE) or "data")


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def md5_of(path: Path) -> str:
    """The MD5 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def climbs(name: str) -> bool:
    """Whether the name of an archive's member leads out of the folder it is unpacked in."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in name


@dataclass(frozen=True)
class Place:
    """A dataset and the folder it is read from; the errors of its files."""

    dataset: str
    root: Path

    def read_bytes(self, path: Path, largest: int) -> bytes:
        """A plain file of at most so many bytes."""
        try:
            return read_plain(path, largest)
        except OSError as error:
            raise self.missing(path) from error
        except ValueError as error:
            raise self.broken(path, str(error)) from error

    def missing(self, path: Path) -> InputError:
        return InputError("data", f"{path} must be there and readable; {self.advice}, or set --data or {VARIABLE}")

    def broken(self, path: Path, rule: str, value: object = None) -> InputError:
        return InputError("data", f"{path}: {rule}; {self.advice}", value)

    def not_published(self, path: Path, expected: str, digest: str) -> InputError:
        return self.broken(path, f"must be the published file, MD5 {expected} (verify=False reads others)", digest)

    @property
    def advice(self) -> str:
        return f"get it with `expunge data get {self.dataset} --data {self.root}`"

    def check_labels(self, path: Path, labels: Tensor, classes: int) -> None:
        low, high = (int(value) for value in torch.aminmax(labels))
        if low < 0 or high >= classes:
            raise self.broken(path, f"labels must be in [0, {classes})", low if low < 0 else high)


def gunzipped_start(content: bytes, size: int) -> bytes:
    """The first bytes of what a gzip file holds, as far as it can be unpacked."""
    with suppress(zlib.error):
        return zlib.decompressobj(wbits=31).decompress(content[:PIECE], size)
    return b""


def gunzipped(content: bytes, largest: int) -> bytes:
    """What a gzip file holds, of one or several members, at most `largest` bytes; a ValueError says what is wrong with it.

    No more than that is ever unpacked: a few megabytes may hold gigabytes of zeros.
    """
    out, place = bytearray(), 0
    for _ in range(MEMBERS):
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = content[place : place + PIECE]
            if not piece:
                raise ValueError("it ends in the middle")
            try:
                out += member.decompress(piece, largest + 1 - len(out))
            except zlib.error as error:
                raise ValueError(str(error)) from error
            place += len(piece) - len(member.unconsumed_tail) - len(member.unused_data)
            if len(out) > largest:
                raise ValueError(f"it holds more than {largest} bytes")
        if place == len(content) or (content[place] == 0 and not content[place:].strip(b"\0")):  # padding
            return bytes(out)
    raise ValueError(f"it has more than {MEMBERS} members")
