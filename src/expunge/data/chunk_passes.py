"""Share a pass over chunks among processes: the same sums, bit for bit, however many there are and whichever of them end early."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from expunge.data.chunks import Chunks
from expunge.runtime import processes
from expunge.runtime.modes import threads
from expunge.runtime.processes import MissingProcessError
from expunge.runtime.progress import track
from expunge.storage.files import check_folder
from expunge.storage.folding import FoldedChunks, Sums

PLACE = "folder `keep`, or be on one machine without"
MOMENT = 0.05  # seconds between two looks for work
SLOWER = 3.0  # times as long as its own slowest chunk a process waits at least for those of others


@contextmanager
def fold(
    prepare: Callable[[], tuple[Chunks, Mapping[str, str]]],
    work: Callable[[Chunks, int], Sums],
    keep: str | os.PathLike[str] | None,
    *,
    cpu_threads: int = 1,
    patience: float = processes.PATIENCE,
    title: str = "chunks",
    progress: bool = False,
) -> Iterator[Mapping[str, Sums]]:
    """The sums of all chunks by group, each chunk computed by one process, all added in the order of the chunks; read within the context.

    `prepare()` returns the chunks and what else fixes the sums; all processes must have the same. `work(chunks, number)` must depend on
    nothing but the chunk. It runs with `cpu_threads` threads, since torch's sums on a CPU change their last bits with their number.
    `keep` is a folder that all processes see; with None it is a temporary one (one machine), or none where a process is alone.
    """
    if keep is None and processes.is_alone():
        yield fold_alone(prepare, work, cpu_threads=cpu_threads, title=title, progress=progress)
        return
    prepared: list[Chunks] = []

    def describe() -> dict[str, str]:
        if keep is not None:
            check_folder("keep", keep)
        chunks, settings = prepare()
        prepared.append(chunks)
        machine = {"torch": torch.__version__, "threads": str(int(cpu_threads))}
        return {**settings, **chunks.described(), "chunks": str(len(chunks)), **machine, PLACE: _place(keep)}

    described = processes.agree(describe, patience)
    del described[PLACE]
    chunks = prepared[0]
    with _shared(keep, patience) as folder:
        try:
            folded = FoldedChunks(folder, described, chunks.groups, patience)
        except TimeoutError as error:
            raise MissingProcessError(str(error)) from error
        if folded.is_done():
            _confirm(folded, chunks)
        with threads(int(cpu_threads)):
            for _ in track(_finished(folded, chunks, work, patience), title, len(chunks), enabled=progress):
                pass
        yield folded.totals()


def _place(keep: str | os.PathLike[str] | None) -> str:
    return socket.gethostname() if keep is None else os.path.abspath(keep)


def fold_alone(
    prepare: Callable[[], tuple[Chunks, Mapping[str, str]]],
    work: Callable[[Chunks, int], Sums],
    *,
    cpu_threads: int = 1,
    title: str = "chunks",
    progress: bool = False,
) -> dict[str, Sums]:
    """The same sums, to the bit, by this process alone, whatever others there are; nothing is written."""
    chunks, _ = prepare()
    totals: dict[str, Sums] = {}
    with threads(int(cpu_threads)):
        for number in track(range(len(chunks)), title, len(chunks), enabled=progress):
            group, sums = chunks.groups[number], work(chunks, number)
            totals[group] = totals[group].plus(sums) if group in totals else sums
    return totals


def _confirm(folded: FoldedChunks, chunks: Chunks) -> None:
    """Read a stream whose sums are all there, to know that they are of these samples: nothing else of it but its first chunk is known."""
    if chunks.stream is not None:
        if len(chunks.stream.digests) < len(chunks):
            for _ in chunks.read(len(chunks) - 1):
                pass
        folded.check(chunks.stream.digests)


def _finished(folded: FoldedChunks, chunks: Chunks, work: Callable[[Chunks, int], Sums], patience: float) -> Iterator[int]:
    """Claim and compute chunks until all are added, those of processes that end early too; yields the chunks of this process."""
    folded.fold()
    added, last, longest = -1, time.monotonic(), 0.0
    while not folded.is_done():
        began = time.monotonic()
        with folded.claim(processes.here()) as number:
            if number is not None:
                folded.put(number, work(chunks, number), chunks.stream.digests if chunks.stream else ())
        folded.fold()
        if number is not None:
            last = time.monotonic()
            longest = max(longest, last - began)
            yield number
            continue
        if folded.added() != added:
            added, last = folded.added(), time.monotonic()
        elif time.monotonic() - last > max(patience, SLOWER * longest):
            held = "; ".join(f"chunk {chunk} by {holder}" for chunk, holder in folded.holders().items())
            held = held or "none is held, and a process that adds them up does not go on"
            rule = "where a chunk takes longer, give more patience"
            raise MissingProcessError(f"no chunk was finished within {time.monotonic() - last:.0f} seconds: {held}; {rule}")
        time.sleep(MOMENT)


@contextmanager
def _shared(keep: str | os.PathLike[str] | None, patience: float) -> Iterator[Path]:
    """The folder of the pass; a temporary one is removed by the last process that leaves it."""
    if keep is not None:
        yield Path(keep)
        return
    made: list[str] = []

    def make() -> dict[str, str]:
        made.extend([tempfile.mkdtemp(prefix="expunge-")] if processes.rank() == 0 else [])
        return {}

    processes.agree(make, patience)  # where rank 0 cannot make one, all are told
    folder = Path(processes.told_by_first("".join(made), patience))
    try:
        yield folder
    finally:
        if processes.is_last(folder):
            shutil.rmtree(folder, ignore_errors=True)
