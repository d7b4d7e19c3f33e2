"""Locks on files that the kernel gives back when their holder ends, however it ends. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from expunge.errors import InputError

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed by another process
    fcntl = None  # type: ignore[assignment]


def lock(file: IO[bytes]) -> bool:
    """Take the lock of an open file, until it is closed; False where another process holds it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: Path) -> IO[bytes]:
    """Made where it is not there; a pipe that nobody reads is an OSError, not a wait."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666))


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """True while this process alone holds the lock, False where another does; the empty file stays.

    Removing it is a race where machines share the folder: one may still see the file that another has just removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as file:
        yield lock(file)


@contextmanager
def held_and_removed(path: Path) -> Iterator[bool]:
    """As `held`, and the file is removed at the end; one that a killed process left is taken over."""
    while True:
        with _opened(path) as file:
            if not lock(file):
                yield False
                return
            if is_at(file, path):  # otherwise its last holder removed it between our two steps
                try:
                    yield True
                finally:
                    path.unlink(missing_ok=True)
                return


def is_at(file: IO[bytes], path: str | os.PathLike[str]) -> bool:
    """Whether an open file is still the one of this path: it may have been removed or replaced since."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


@contextmanager
def held_alone(argument: str, folder: str | os.PathLike[str], names: Iterable[str]) -> Iterator[None]:
    """The locks of several trainings in a folder, refused where another process trains one of these names there."""
    with ExitStack() as stack:
        for name in names:
            if not stack.enter_context(held(Path(folder) / "locks" / f"{name}.lock")):
                rule = "must not be in use: another training of this name is running there"
                raise InputError(argument, rule, f"{os.fspath(folder)}/{name}")
        yield
