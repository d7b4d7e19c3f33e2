"""Lock open files by `filelock`, on every system; the kernel gives a lock back when its holder ends, however it ends. Needs no torch.

Locks are on open files (flock, on Windows LockFileEx), not on paths: what is locked may be renamed, and whether it still is what its path
names is asked afterwards, by `is_at`. filelock's soft locks, which a killed process leaves behind, are never used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from expunge.errors import InputError

OPEN_FILES_STAY = os.name == "nt"  # Windows neither removes nor renames a file that is open, by whomever


def lock(file: IO[bytes]) -> bool:
    """Take the lock of an open file, until it is closed; False where another process has it."""
    from filelock import lock_descriptor  # not above: it hooks into every fork, which code that only imports us should not pay for

    return lock_descriptor(file.fileno(), blocking=False)


def _opened(path: Path) -> IO[bytes]:
    """Made where it is not there; a pipe that nobody reads is an OSError, not a wait."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666))


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to lock this path: True while this process alone has the lock, False where another has it. The empty file stays.

    Removing it is a race where machines share the folder: one may still see the file that another has just removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as file:
        yield lock(file)


@contextmanager
def try_lock_and_remove(path: Path) -> Iterator[bool]:
    """As `try_lock`, and the file is removed at the end. One that a killed process left is taken over."""
    while True:
        with _opened(path) as file:
            if not lock(file):
                yield False
                return
            if is_at(file, path):  # otherwise its last holder removed it between our two steps
                try:
                    yield True
                finally:
                    remove_open(file, path)
                return


def remove_open(file: IO[bytes], path: Path) -> None:
    """Remove a file that we have open and locked.

    It is removed while we hold the lock, so the next process that locks it sees by `is_at` that it is gone. Where `OPEN_FILES_STAY` it is
    closed before; if another process has opened it since, it stays, and is that one's to remove.
    """
    if not OPEN_FILES_STAY:
        path.unlink(missing_ok=True)
        return
    file.close()
    with suppress(PermissionError):
        path.unlink(missing_ok=True)


def is_at(file: IO[bytes], path: str | os.PathLike[str]) -> bool:
    """Whether an open file is still the one of this path: it may have been removed or replaced since."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


@contextmanager
def lock_all(argument: str, folder: str | os.PathLike[str], names: Iterable[str]) -> Iterator[None]:
    """Lock several names in a folder, such as of trainings. Raises InputError where another process works on one of them there."""
    with ExitStack() as stack:
        for name in names:
            if not stack.enter_context(try_lock(Path(folder) / "locks" / f"{name}.lock")):
                rule = "must not be in use: another command is at work on it there"
                raise InputError(argument, rule, os.fspath(Path(folder) / name))
        yield
