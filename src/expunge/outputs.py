"""Where results may be written, looked at before the work. Commands import this at their start, so it must not need torch."""

from __future__ import annotations

import os
from pathlib import Path

from expunge.errors import InputError


def check_folder(argument: str, path: str | os.PathLike[str]) -> None:
    """Before the work: whether results can be written into this folder, which need not be there yet."""
    if not os.fspath(path):
        raise InputError(argument, "must be a folder's path", "an empty one")
    nearest = Path(os.path.realpath(path))
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise InputError(argument, f"must be a folder, and {nearest} is none", os.fspath(path))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(argument, f"must be a folder that can be written, and {nearest} cannot", os.fspath(path))


def check_file(argument: str, path: str | os.PathLike[str]) -> None:
    """Before the work: whether this file can be written."""
    target = Path(os.path.realpath(path))
    if not os.fspath(path) or (target.exists() and not target.is_file()):
        raise InputError(argument, "must be the path of a plain file, or of a new one", os.fspath(path) or "an empty one")
    check_folder(argument, target.parent)
