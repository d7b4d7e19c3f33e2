"""What `demo` and `compare` share: checks of their options, and results that are printed before they are saved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expunge.errors import InputError


def shown_and_saved(texts: Sequence[Callable[[], str]], save: Callable[[], Path]) -> Path:
    """Print what was found, then save it: a disk may be full, and then it has been shown. Saved also where nobody reads it."""
    try:
        for text in texts:
            print(text())
        sys.stdout.flush()
    finally:
        saved = save()
    return saved


def check_epochs(options: Any) -> None:
    for name in ("epochs", "tuning_epochs"):
        if getattr(options, name) < 1:
            raise InputError(name, "must be at least 1", getattr(options, name))
