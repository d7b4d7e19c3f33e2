"""Keep parts of an audit that take long in a folder, so that nothing is lost on a kill."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from expunge.audit import features, intervals, measures, reading, relearning, rounding, similarity, strata
from expunge.audit.reading import Reading
from expunge.metrics import membership, probing
from expunge.metrics import relearning as curves
from expunge.storage.codec import decode, encode
from expunge.storage.documents import read_json
from expunge.storage.files import write_bytes
from expunge.storage.tensors import add_bytes, weights_digest

NOT_KEPT = "by no digest"
COMPUTING: tuple[Any, ...] = (
    *(features, intervals, measures, reading, relearning, rounding, similarity, strata),
    *(curves, membership, probing),
)
"""The modules whose code computes what is kept."""


class Keep(Protocol):
    """The value of a type that was kept under this key, or else computed and kept."""

    def __call__(self, key: str, kind: Any, compute: Callable[[], Any]) -> Any: ...


def computed(key: str, kind: Any, compute: Callable[[], Any]) -> Any:
    """Keep nothing."""
    return compute()


@cache
def version() -> str:
    """A digest of the code that computes parts, and PyTorch's version: a part of other code is not read back.

    By the sources, so that nobody has to remember to raise a number; a changed comment costs a computation.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    for module in COMPUTING:
        digest.update(module.__loader__.get_data(module.__file__))
    return digest.hexdigest()[:16]


class Folder:
    """A file of JSON per part, written whole or not at all. One that cannot be read, or that other code computed, is computed anew."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __call__(self, key: str, kind: Any, compute: Callable[[], Any]) -> Any:
        if NOT_KEPT in key:
            return compute()
        key = f"{version()} {key}"
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = read_json(path)
            if content["key"] == key:
                return decode(kind, content["value"])
        value = compute()
        write_bytes(path, json.dumps({"key": key, "value": encode(value)}, allow_nan=False).encode())  # in order, as it was computed
        return value


def key_of(network: nn.Module, reading: Reading, data: Sequence[str | None], *others: Reading) -> str:
    """By the weights, by the answers (a wrapper has the weights of what it wraps), and by the data; no key where those have no digest."""
    if None in data:
        return NOT_KEPT
    digest = hashlib.sha256(weights_digest(network).encode())
    for part in (part for source in (reading, *others) for part in source.parts.values()):
        add_bytes(digest, part.losses)
        add_bytes(digest, part.predicted)
    return f"{digest.hexdigest()} {' '.join(map(str, data))}"
