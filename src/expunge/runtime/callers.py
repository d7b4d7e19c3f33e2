"""Find the line outside this package that a call came from, so that warnings point to it."""

from __future__ import annotations

import contextlib
import sys
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
