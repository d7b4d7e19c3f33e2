"""A lock on a file that the kernel gives back when its holder ends, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from expunge.errors import InputError


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """True while this process alone holds the lock, False where another does; the empty file stays, since removing it would be a race."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def held_alone(argument: str, folder: str | os.PathLike[str], names: Iterable[str]) -> Iterator[None]:
    """The locks of several trainings in a folder, refused where another process trains one of these names there."""
    with ExitStack() as stack:
        for name in names:
            if not stack.enter_context(held(Path(folder) / "locks" / f"{name}.lock")):
                rule = "must not be in use: another training of this name is running there"
                raise InputError(argument, rule, f"{os.fspath(folder)}/{name}")
        yield
