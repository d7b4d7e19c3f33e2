"""Where datasets lie, and errors that say what was looked for and how to get it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from expunge.errors import InputError

VARIABLE = "EXPUNGE_DATA"


def data_folder(data: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the datasets: the one given, else the environment's EXPUNGE_DATA, else ./data."""
    return Path(data if data is not None else os.environ.get(VARIABLE) or "data")


def read_bytes(path: Path, dataset: str, root: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise missing(path, dataset, root) from error


def missing(path: Path, dataset: str, root: Path) -> InputError:
    return InputError("data", f"{path} must be there and readable; {advice(dataset, root)}, or set --data or {VARIABLE}")


def broken(path: Path | str, dataset: str, root: Path, rule: str, found: object = None) -> InputError:
    return InputError("data", f"{path}: {rule}; {advice(dataset, root)}", found)


def advice(dataset: str, root: Path) -> str:
    return f"get it with `expunge data get {dataset} --data {root}`"


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


def check_published(path: Path, dataset: str, root: Path, content: bytes, published: Mapping[str, str]) -> None:
    """The file must have the published MD5."""
    expected, found = published[path.name.removesuffix(".gz")], md5(content)
    if found != expected:
        raise not_published(path, dataset, root, expected, found)


def not_published(path: Path, dataset: str, root: Path, expected: str, found: str) -> InputError:
    rule = f"must be the published file, MD5 {expected} (verify=False reads others)"
    return broken(path, dataset, root, rule, found)


def check_labels(path: Path | str, dataset: str, root: Path, labels: Tensor, classes: int) -> None:
    low, high = (int(value) for value in torch.aminmax(labels))
    if low < 0 or high >= classes:
        raise broken(path, dataset, root, f"labels must be in [0, {classes})", low if low < 0 else high)
