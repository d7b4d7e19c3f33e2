"""Read a store of the Fisher sums of all training data, by group and in total: a request then costs a pass over its own samples alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums
from expunge.requests.canonical import canonical, digest
from expunge.requests.grouping import By, Grouping
from expunge.requests.summing import Rest
from expunge.requests.task import Task
from expunge.requests.weights import file_digest
from expunge.storage.codec import Count, decode, encode
from expunge.storage.documents import excerpt, parse_json, read_plain
from expunge.storage.folders import remove
from expunge.storage.locks import try_lock
from expunge.storage.tensors import load_tensors, weights_digest

STORE, ROWS, TOTAL, PASS, LOCK = "store.json", "rows", "total", "pass-", ".lock"
EARLIER = ("expunge sums 1", "expunge sums 2")  # other chunks or plans: the sums of a request could differ in their last bits
KINDS = ("empirical", "expected")
LARGEST = 2**24  # bytes of store.json


@dataclass(frozen=True)
class Header:
    """What a store is of, and its files by name with their digests. `dropped`: the commitments of the requests whose samples it lacks."""

    fisher: str
    weights: str
    data: str | None
    samples: Count
    batch_size: Count
    threads: Count
    groups: tuple[str, ...]
    files: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    changes: Count = 0
    kind: Literal["expunge sums 3"] = "expunge sums 3"

    def content(self) -> bytes:
        """With a digest of its own: any changed byte is noticed."""
        content = encode(self)
        return canonical(content | {"digest": digest(canonical(content))})

    def file(self, what: str) -> str | None:
        """The file of a group or of the total in its present state."""
        return next((name for name in self.files if name.split(".")[0] == what), None)

    @property
    def complete(self) -> bool:
        return self.file(TOTAL) is not None

    @property
    def by(self) -> By:
        return "class" if self.groups[0].startswith("label") else "rows"


@dataclass(frozen=True, eq=False)
class Store:
    """An open store: whoever has it holds its lock."""

    folder: Path
    header: Header
    grouping: Grouping

    def sums(self, what: str) -> Rest | None:
        """The stored sums of "total" or "group-3"; None where they were dropped as a whole, or are not there yet."""
        name = self.header.file(what)
        if name is None:
            return None
        tensors, metadata = load_tensors(self.folder / name, "expunge sums")
        parts = [
            {key.removeprefix(f"{half}/"): value for key, value in tensors.items() if key.startswith(f"{half}/")}
            for half in ("high", "low")
        ]
        low = parts[1] or {key: torch.zeros_like(value) for key, value in parts[0].items()}
        return Rest(parts[0], low, int(metadata["count"]))

    def like(self, sums: Rest) -> FisherSums:
        return FisherSums(sums.high, sums.count, self.header.fisher, self.header.weights)


@contextmanager
def opened(folder: str | os.PathLike[str], argument: str = "sums") -> Iterator[Store]:
    """A store, checked and locked; what a killed process left there unlisted is removed."""
    path = Path(folder)
    if not (path / STORE).is_file():
        raise InputError(argument, "must be a folder that `expunge fisher build` wrote", os.fspath(folder))
    with locked(path, argument):
        yield read_store(path, argument)


def read_store(path: Path, argument: str) -> Store:
    header = read_header(path / STORE, argument)
    for name, expected in header.files.items():
        if not (path / name).is_file() or file_digest(path / name) != expected:
            raise InputError(argument, "must be as `expunge fisher build` left it", f"{name} in {path}, missing or changed")
    for name in os.listdir(path):
        if name.endswith(".safetensors") and name not in header.files:
            (path / name).unlink()
        elif name.startswith(PASS) and header.complete:
            remove(path / name)
    rows = header.file(ROWS)
    assert rows is not None
    return Store(path, header, Grouping(header.groups, load_tensors(path / rows, "expunge groups")[0]["group"]))


def read_header(path: Path, argument: str) -> Header:
    try:
        content = read_plain(path, LARGEST)
        parsed = parse_json(content)
        if parsed.get("kind") in EARLIER:
            raise ValueError("it is of an earlier version of expunge: build it anew, in a new folder")
        own = parsed.pop("digest")
        header = decode(Header, parsed, "the store")
        if digest(canonical(encode(header))) != own or header.content() != content:
            raise ValueError("its content was changed")
        if header.file(ROWS) is None or any("/" in name or name.startswith(".") for name in header.files):
            raise ValueError("its list of files is none")
        return header
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(argument, f"must be a store of sums as it was written ({excerpt(error)})", os.fspath(path)) from error


@contextmanager
def locked(path: Path, argument: str) -> Iterator[None]:
    with try_lock(path / LOCK) as free:
        if not free:
            raise InputError(argument, "must not be in use: another command works with this store", os.fspath(path))
        yield


def check_fits(store: Store, task: Task, model: nn.Module, kind: str) -> None:
    """Raise where a store is not of this model and these data, or not complete."""
    header = store.header
    if header.weights != weights_digest(model):
        raise MismatchError(f"sums: {store.folder} is a store of other weights, with fingerprint {header.weights[:12]}")
    if not task.is_data(header.data) or header.samples != task.rows.samples:
        sizes = "" if header.samples == task.rows.samples else f", {header.samples} samples and not {task.rows.samples}"
        raise MismatchError(f"sums: {store.folder} is a store of other training data{sizes}")
    if header.fisher != kind:
        raise MismatchError(f"sums: {store.folder} holds sums of the kind {header.fisher}; the method asks for {kind}")
    if not header.complete:
        missing = [name for number, name in enumerate(header.groups) if header.file(f"group-{number}") is None]
        raise InputError(
            "sums", "must be complete: run `expunge fisher build` to its end, or merge the other shards", f"no sums of {missing[0]}"
        )
