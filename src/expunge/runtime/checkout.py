"""Name the commit that the program runs from, for results to say what made them."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

VARIABLE = "EXPUNGE_COMMIT"  # for a copy of the files without their history
SOURCE = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The commit, with "+" where files of the package differ from it; "" where it is not known."""
    return os.environ.get(VARIABLE) or _from_git(SOURCE)


@cache
def _from_git(source: Path) -> str:
    try:
        tracked = _git(source, "ls-files", "--", "__init__.py")  # an installed package may lie within a checkout of something else
        name = _git(source, "rev-parse", "--short=12", "HEAD") if tracked else ""
        return f"{name}+" if name and _git(source, "status", "--porcelain", "--", ".") else name
    except (OSError, subprocess.SubprocessError):  # no git, no checkout
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
