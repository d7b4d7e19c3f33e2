"""Read parts of a stream one after the other, and make sure that it gives the same samples each time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from expunge.data.batches import Batches
from expunge.data.digest import add_batch
from expunge.data.objective import Batch
from expunge.errors import InputError, MismatchError

STABLE = "a stream must give the same samples in the same order each time it is read, on every process (seed its shuffling and transforms)"


class Cursor:
    """Reads parts of `size` batches: whoever asks for a later part goes on where the last one ended, for an earlier one from the beginning.

    `digests` holds 63 bits of SHA-256 for every part that was read or passed over. A part that is other samples when it is read
    again raises MismatchError. Memory: a batch, and a number per part.
    """

    def __init__(self, batches: Batches, size: int, argument: str) -> None:
        self.batches, self.size, self.argument = batches, size, argument
        self.digests: list[int] = []
        self._iterator: Iterator[Batch] | None = None
        self._position = 0
        self._digest = hashlib.sha256()

    def look(self) -> int:
        """Read the first part, or all of a stream that does not say its length; returns the number of batches."""
        self._begin()
        known = self.batches.known
        while (known is None or self._position < min(known, self.size)) and self._next() is not None:
            pass
        if known is None and self._position % self.size:
            self._note()
        return len(self.batches)

    def part(self, number: int) -> Batches:
        """The batches of a part; those before it are read and left out."""
        first, last = number * self.size, min(len(self.batches), (number + 1) * self.size)

        def read(seed: int | None) -> Iterator[Batch]:
            if self._iterator is None or self._position > first:
                self._begin()
            while self._position < last:
                batch = self._next()
                if batch is None:
                    raise InputError(self.argument, f"must give the same batches each time, {last} or more", self._position)
                if self._position > first:
                    yield batch
            if last == len(self.batches):
                next(self._iterator or iter(()), None)  # a stream that gives more than it promises is told so

        return Batches(read, last - first)

    def _begin(self) -> None:
        self._iterator, self._position, self._digest = iter(self.batches), 0, hashlib.sha256()

    def _next(self) -> Batch | None:
        assert self._iterator is not None
        batch = next(self._iterator, None)
        if batch is not None:
            add_batch(self._digest, batch)
            self._position += 1
            if self._position % self.size == 0 or self._position == self.batches.known:
                self._note()
        return batch

    def _note(self) -> None:
        """A part has been read to its end: keep its digest, or compare it with that of the first time."""
        number, digest = (self._position - 1) // self.size, int.from_bytes(self._digest.digest()[:8], "big") >> 1
        self._digest = hashlib.sha256()
        if number == len(self.digests):
            self.digests.append(digest)
        elif digest != self.digests[number]:
            raise MismatchError(f"{self.argument}: chunk {number} held other samples when it was read again; {STABLE}")
