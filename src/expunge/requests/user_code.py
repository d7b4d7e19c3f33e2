"""Tell what a user's code raises on one line, with the place in their file."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expunge.errors import ExpungeError, InputError

ARGUMENT = "task"
WORKER = "in DataLoader worker process"  # torch raises there what a worker raised, with its traceback as text


@contextmanager
def user_code(what: str, path: Path) -> Iterator[None]:
    """Within the context a user's code is called: whatever it raises is an InputError that says `what` must not.

    Nor may it go to another working directory: the paths of a request are relative to this one, `out` with the earlier requests too.
    """
    before = _working_directory()
    try:
        yield
    except ExpungeError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(ARGUMENT, f"{what} must not raise", f"{_line(error)} ({_place(error, path)})") from error
    if before is not None and (now := _working_directory()) != before:
        os.chdir(before)
        rule = f"{what} must stay in the working directory, which other paths are relative to; give full paths, from Path(__file__).parent"
        raise InputError(ARGUMENT, rule, f"it went to {now}")


@contextmanager
def called_back(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Within the context our code calls a user's, such as a dataset of the task file at `path`: what that raises is an InputError.

    It is the user's where a line of their file, or of one beside it, was at work. Everything else is raised as it is.
    """
    try:
        yield
    except ExpungeError:
        raise
    except (Exception, SystemExit) as error:
        if path is None or not (_own_frames(error, Path(path)) or WORKER in str(error)):
            raise
        rule = f"what {os.fspath(path)} returns must not raise when it is used"
        raise InputError(ARGUMENT, rule, f"{_line(error)} ({_place(error, Path(path))})") from error


def _working_directory() -> str | None:
    """None where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _line(error: BaseException) -> str:
    """The error on one line; of one in a worker of a loader its last line, and not all of its traceback."""
    text = str(error).strip()
    if WORKER in text:
        return text.splitlines()[-1]
    return " ".join(f"{type(error).__name__}: {text}".split())


def _place(error: BaseException, path: Path) -> str:
    """The last line of the user's files that was run, or of any other where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = _own_frames(error, path) or traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def _own_frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    """Those of the file, and of others in its folder that are not installed there."""
    file = os.path.realpath(path)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if _is_beside(os.path.realpath(frame.filename), file)]


def _is_beside(name: str, file: str) -> bool:
    return name == file or (os.path.dirname(name) == os.path.dirname(file) and not name.startswith("<"))
