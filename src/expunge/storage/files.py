"""Write files whole or not at all, and check before the work where they may go. Commands import this first, so it must not need torch."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from expunge.errors import InputError
from expunge.storage import locks
from expunge.storage.locks import is_at, lock, remove_open

UNFINISHED = ".expunge-unfinished-"  # begins the name of a file that is being written
MOMENT = 60.0  # seconds between a file's last byte and its renaming that no writer that lives takes


def shown_folder(folder: str | os.PathLike[str]) -> str:
    """A folder in a message, with one slash at its end, however it was typed."""
    return f"{Path(folder)}/"


def check_folder(argument: str, path: str | os.PathLike[str]) -> None:
    """Before the work: whether results can be written into this folder, which need not be there yet."""
    _check_path(argument, path)
    if not os.fspath(path):
        raise InputError(argument, "must be a folder's path", "an empty one")
    nearest = Path(os.path.realpath(path))
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise InputError(argument, f"must be a folder, and {nearest} is not one", os.fspath(path))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(argument, f"must be a folder that is writable, and {nearest} is not", os.fspath(path))


def check_file(argument: str, path: str | os.PathLike[str]) -> None:
    """Before the work: whether this file can be written."""
    _check_path(argument, path)
    target = Path(os.path.realpath(path))
    if not os.fspath(path) or (target.exists() and not target.is_file()):
        raise InputError(argument, "must be the path of a plain file, or of a new one", os.fspath(path) or "an empty one")
    check_folder(argument, target.parent)


def _check_path(argument: str, path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(argument, "must be a path, a string or a pathlib.Path", repr(path))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file atomically: it holds the whole content or, after a crash or a full disk, what it held before.

    A link stays, the file it leads to is written. A device, a pipe or a folder raises InputError: to replace it would destroy it.
    """
    return write_pieces(path, [content])


def write_pieces(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> Path:
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InputError("path", "must be a plain file, or a new one", os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(target.parent)
    try:
        with _unfinished(target.parent) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
            if locks.OPEN_FILES_STAY:
                file.close()
            os.replace(file.name, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # instead of the temporary file, or of none
    return Path(path)


@contextmanager
def _unfinished(folder: Path) -> Iterator[IO[bytes]]:
    """A new file in the folder, locked so that others see that its writer lives; removed unless it was renamed within."""
    while True:
        name = folder / f"{UNFINISHED}{secrets.token_hex(8)}"  # not mkstemp's, which only its owner may read
        with name.open("xb") as file:
            with suppress(OSError):  # a file system without locks, where nobody takes the file for a dead writer's
                if not lock(file) or not is_at(file, name):
                    continue  # taken for a dead writer's before it was locked
            try:
                yield file
            finally:
                remove_open(file, name)
            return


def _remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left in a folder; those that live hold a lock.

    Where `OPEN_FILES_STAY` a writer gives its lock up a moment before it renames the file, so a file must be older than that.
    """
    for entry in os.scandir(folder):
        if entry.name.startswith(UNFINISHED) and entry.is_file(follow_symlinks=False):
            with suppress(OSError), open(entry.path, "r+b") as file:
                settled = not locks.OPEN_FILES_STAY or time.time() - os.fstat(file.fileno()).st_mtime > MOMENT
                if settled and lock(file):
                    remove_open(file, Path(entry.path))


def write_json(path: str | os.PathLike[str], content: Any) -> Path:
    """Text that is not Unicode, as a file's name may be, gets question marks: `documents.parse_json` would not read it."""
    content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    return write_bytes(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
