"""Find the line outside this package that a call came from, so that warnings point to it, and say what they are about."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PASSED_OVER = (f"{Path(__file__).resolve().parents[1]}/", contextlib.__file__)  # a context of ours is entered through Python's file


def level_of_caller() -> int:
    """The `stacklevel` with which a warning of the calling function names the first line outside this package, however deep it is."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(PASSED_OVER):
        frame, level = frame.f_back, level + 1
    return level


@contextlib.contextmanager
def warnings_about(name: str) -> Iterator[None]:
    """Begin every warning of what is done within by a name, such as that of one of several methods."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        warnings.warn(f"{name}: {warning.message}", warning.category, stacklevel=level_of_caller())
