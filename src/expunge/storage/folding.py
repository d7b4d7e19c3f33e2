"""Add up sums of numbered chunks in a folder that several processes share: each chunk is claimed once, and added in its turn.

The folder holds `listing.json` (what is added up), a `chunk-N` for every chunk that is finished and not yet added, `total` (the sums of the
chunks before, of the group that is being added), and a `group-N` for every group that is complete. A pass over a stream adds `digests`:
what every chunk held, as it was read. All are written whole or not at all.
A claim is a lock: the kernel gives it back when its holder ends, however it ends, and another process takes the chunk over.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expunge.errors import InputError, MismatchError
from expunge.storage.documents import excerpt, fingerprinted, named_number, read_json
from expunge.storage.files import write_json
from expunge.storage.locks import try_lock, try_lock_and_remove
from expunge.storage.tensors import load_tensors, open_tensors, save_tensors

LISTING, TOTAL, KIND = "listing.json", "total.safetensors", "chunk-sums"
DIGESTS, DIGESTS_KIND = "digests.safetensors", "chunk-digests"
MOMENT = 0.01  # seconds between two looks
TOGETHER = 8  # chunks that are added at once: each time the total is read and written
WINDOW = 64  # chunks after the last added one that may be claimed: so many files are there at most


@dataclass(frozen=True)
class Sums:
    """Float64 sums by name, and how many samples (or batches) they are of."""

    sums: dict[str, Tensor]
    count: int

    def plus(self, other: Sums) -> Sums:
        """Entry by entry; changes the sums of this one in place."""
        for name, value in other.sums.items():
            self.sums[name] += value
        return Sums(self.sums, self.count + other.count)


class Totals(Mapping[str, Sums]):
    """Sums by group, each read when it is asked for: all of them may not fit into memory."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Sums]) -> None:
        self.names, self.read = names, read

    def __getitem__(self, name: str) -> Sums:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class FoldedChunks:
    """The sums of chunks by group, ((c₀ + c₁) + c₂) + ...; `groups` names the group of every chunk, those of a group in a row."""

    def __init__(
        self, folder: str | os.PathLike[str], listing: Mapping[str, str], groups: Sequence[str], patience: float = math.inf
    ) -> None:
        self.folder, self.groups = Path(folder), groups
        self.names = list(dict.fromkeys(groups))
        self.places = {name: place for place, name in enumerate(self.names)}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._enter(dict(listing), patience)

    def _enter(self, listing: dict[str, str], patience: float) -> None:
        """Write the listing, or compare it with that of an earlier process; TimeoutError where that process does not write it."""
        path, end = self.folder / LISTING, time.monotonic() + patience
        while not path.exists():
            with try_lock(self.folder / "folder.lock") as ours:
                if ours and not path.exists():
                    if others := sorted(entry.name for entry in self.folder.iterdir() if not _is_hidden(entry.name)):
                        raise InputError("keep", "must be a new folder, or one of the same pass", f"{self.folder} with {others[0]}")
                    write_json(path, listing)
            if time.monotonic() > end and not path.exists():
                raise TimeoutError(
                    f"{path} was not written within {patience:g} seconds, by a process that holds {self.folder / 'folder.lock'}"
                )
            time.sleep(MOMENT)
        try:
            there = read_json(path)
            if not isinstance(there, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise InputError("keep", f"must be the folder of a pass ({excerpt(str(error))})", os.fspath(path)) from error
        for name in dict.fromkeys([*listing, *there]):
            if there.get(name) != listing.get(name):
                kept, own = (excerpt(fingerprinted(str(values.get(name))), 80) for values in (there, listing))
                raise MismatchError(f"keep: {self.folder} belongs to a pass with another {name}: {kept} there and {own} here")

    def added(self) -> int:
        """The number of chunks that are in the totals."""
        path = self.folder / TOTAL
        return self._read(path)[1] if path.exists() else 0

    def is_done(self) -> bool:
        return self.added() == len(self.groups)

    @contextmanager
    def claim(self, holder: str) -> Iterator[int | None]:
        """A chunk that is neither finished nor held by another process, for as long as the context lasts; None: there is none now."""
        for number in self._unfinished():
            with try_lock_and_remove(self.folder / f"claim-{number:08d}.lock") as ours:
                # Looked at again under the lock, the file before the total: another process may have finished it, and a third added it.
                if ours and not self._chunk(number).exists() and number >= self.added():
                    with suppress(OSError):
                        (self.folder / f"claim-{number:08d}.lock").write_text(holder)
                    yield number
                    return
        yield None

    def _unfinished(self) -> list[int]:
        added = self.added()
        return [number for number in range(added, min(added + WINDOW, len(self.groups))) if not self._chunk(number).exists()]

    def holders(self) -> dict[int, str]:
        """The chunks that are claimed now, and by whom."""
        held = {}
        for path in sorted(self.folder.glob("claim-*.lock")):
            with suppress(OSError, ValueError):
                held[int(path.stem.removeprefix("claim-"))] = path.read_text(errors="replace")
        return held

    def put(self, number: int, sums: Sums, digests: Sequence[int] = ()) -> None:
        """Keep the sums of a chunk that this process holds; `digests` are of all chunks of a stream that it has read, from the first on."""
        self.check(digests)
        self._write(self._chunk(number), sums, 1, digests[max(0, number + 1 - WINDOW) : number + 1])

    def check(self, digests: Sequence[int]) -> None:
        """Raise MismatchError where chunks that were added held other samples than this process has read."""
        if digests:
            self._compare(dict(enumerate(self._digests())), dict(enumerate(digests)))

    def fold(self) -> None:
        """Add finished chunks in their order, if there are enough of them or they are the last; not where another process is at it."""
        with try_lock(self.folder / "folder.lock") as ours:
            if not ours:
                return
            path, total, added = self.folder / TOTAL, None, self.added()
            end = added
            while end < len(self.groups) and self._chunk(end).exists():
                end += 1
            if end - added < TOGETHER and end < len(self.groups):
                return
            digests = self._agreed(added, end)
            if added and added < len(self.groups) and self.groups[added] == self.groups[added - 1]:
                total = self._load(path)
            for number in range(added, end):
                chunk = self._load(self._chunk(number))
                total = chunk if total is None else total.plus(chunk)
                if number + 1 == len(self.groups) or self.groups[number + 1] != self.groups[number]:
                    self._write(self._group(self.groups[number]), total, number + 1)
                    total = None
            if digests:
                save_tensors(self.folder / DIGESTS, {"digests": torch.tensor(digests)}, {"kind": DIGESTS_KIND})
            if end > added:
                self._write(path, total or Sums({}, 0), end)
            for number in range(max(0, end - WINDOW - TOGETHER), end):  # also what a kill left between the two steps
                self._chunk(number).unlink(missing_ok=True)

    def _agreed(self, added: int, end: int) -> list[int]:
        """The digests of all chunks before `end`, once all processes that computed some of them have read the same samples.

        A file of a chunk tells what its process read of the chunks before: at least of all that were not added when it claimed the chunk.
        """
        known = dict(enumerate(self._digests()))
        for number in range(added, end):
            seen = self._metadata(self._chunk(number)).get("digests", "").split()
            view = {number + 1 - len(seen) + place: named_number(digest, 2**63 - 1) for place, digest in enumerate(seen)}
            self._compare(known, view)
            known |= view
        if known and sorted(known)[:end] != list(range(end)):
            raise InputError("keep", "must hold the digests of all chunks that were added", os.fspath(self.folder / DIGESTS))
        return [known[number] for number in range(end)] if known else []

    def _digests(self) -> list[int]:
        path = self.folder / DIGESTS
        return load_tensors(path, DIGESTS_KIND)[0]["digests"].tolist() if path.exists() else []

    def _compare(self, known: Mapping[int, int], view: Mapping[int, int]) -> None:
        for number, digest in view.items():
            if known.get(number, digest) != digest:
                rule = "a stream must give the same samples in the same order on every process, and after a restart; else use a new folder"
                raise MismatchError(f"data: chunk {number} of {self.folder} held other samples than one of its processes has read; {rule}")

    def totals(self) -> Totals:
        """The sums of all groups, once all chunks are added."""
        return Totals(self.names, lambda name: self._load(self._group(name)))

    def remove(self, name: str) -> None:
        """Remove the sums of a group, which are kept elsewhere now."""
        self._group(name).unlink(missing_ok=True)

    def _chunk(self, number: int) -> Path:
        return self.folder / f"chunk-{number:08d}.safetensors"

    def _group(self, name: str) -> Path:
        return self.folder / f"group-{self.places[name]:06d}.safetensors"

    def _write(self, path: Path, sums: Sums, chunks: int, digests: Sequence[int] = ()) -> None:
        metadata = {"kind": KIND, "count": str(sums.count), "chunks": str(chunks)}
        save_tensors(path, sums.sums, metadata | ({"digests": " ".join(map(str, digests))} if digests else {}))

    def _load(self, path: Path) -> Sums:
        tensors, metadata = load_tensors(path, KIND)
        return Sums(tensors, named_number(metadata["count"], 2**63 - 1))

    def _read(self, path: Path) -> tuple[int, int]:
        """The count and the number of chunks of a file, without its tensors."""
        try:
            metadata = self._metadata(path)
            return named_number(metadata["count"], 2**63 - 1), named_number(metadata["chunks"], len(self.groups))
        except (KeyError, ValueError) as error:
            raise InputError("keep", f"must hold the sums of a pass ({excerpt(str(error))})", os.fspath(path)) from error

    def _metadata(self, path: Path) -> dict[str, str]:
        try:
            with open_tensors(path) as file:
                return dict(file.metadata() or {})
        except OSError:
            raise
        except Exception as error:
            raise InputError("keep", f"must hold whole safetensors files ({excerpt(str(error))})", os.fspath(path)) from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "folder.lock"
