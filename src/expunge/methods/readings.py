"""The readings of a method: the text's, and those that have a constructor of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def readings(kind: type) -> dict[str, Callable[..., Any]]:
    """How each reading of a method is built, by name: "text" by the class itself, "released" by its `as_released`, others likewise."""
    named = [name for name in dir(kind) if name.startswith("as_") and isinstance(inspect.getattr_static(kind, name), classmethod)]
    others = {name.removeprefix("as_"): getattr(kind, name) for name in named}
    return {"text": kind, **{name: others[name] for name in sorted(others, key=lambda name: (name != "released", name))}}
