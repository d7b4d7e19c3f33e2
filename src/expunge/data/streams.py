"""Read data that do not fit into memory, in a stated order: the samples of several files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from expunge.data.batches import Batches
from expunge.data.objective import Batch
from expunge.data.promises import Learned, raise_if_broken_off, unbroken
from expunge.errors import InputError
from expunge.validate import shown

BLOCK, BLOCKS = 2**14, 8  # bytes that are compared of every file: all of one of 128 kB, and 0.1 ms each


@dataclass(frozen=True)
class Shards:
    """Samples in several files, or other sources; `read(source)` gives the samples of one, in their order, each time the same.

    The order of the data is that of the sources. Each source is a chunk of its own, so that processes share sources and read no other.
    """

    sources: Sequence[str | os.PathLike[str]]
    read: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        if isinstance(self.sources, (str, bytes)) or not isinstance(self.sources, Sequence) or not self.sources:
            raise InputError("sources", "must be a list of one or more files, or of what `read` takes", shown(self.sources))
        if len({*map(str, self.sources)}) != len(self.sources):
            raise InputError("sources", "must be different from each other", shown(list(self.sources)))
        if not callable(self.read):
            raise InputError("read", "must be a function that gives the samples of a source", shown(self.read))

    def described(self) -> str:
        """The sources by name, and where they are files by size and some of their bytes."""
        return "|".join(f"{source}:{_looked_at(source) if os.path.isfile(source) else ''}" for source in map(str, self.sources))

    def batches(self, number: int, batch_size: int, argument: str = "data") -> Batches:
        """The batches of a source; the last may be smaller. So many samples are in memory at once, and no more."""

        def read(seed: int | None) -> Iterator[Batch]:
            samples = unbroken(iter(self.read(self.sources[number])), argument)
            while part := list(islice(samples, batch_size)):
                try:
                    yield default_collate(part)
                except (TypeError, RuntimeError) as error:
                    raise_if_broken_off(error, argument)
                    rule = f"samples must be tensors or numbers of one shape ({str(error).splitlines()[0]})"
                    raise InputError(argument, rule, str(self.sources[number])) from error

        return Batches(read, Learned())


def _looked_at(path: str) -> str:
    """The size of a file, and a digest of blocks spread over it from its first byte to its last."""
    size = os.path.getsize(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for number in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return f"{size}:{digest.hexdigest()}"
