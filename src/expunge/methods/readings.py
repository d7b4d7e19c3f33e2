"""List the readings of a method: the paper's text, and every `as_...` constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def readings(kind: type) -> dict[str, Callable[..., Any]]:
    """The constructor of every reading of a method, by name: "text" by the class itself, "released" by its `as_released`, and so on."""
    named = [name for name in dir(kind) if name.startswith("as_") and isinstance(inspect.getattr_static(kind, name), classmethod)]
    alternatives = {name.removeprefix("as_"): getattr(kind, name) for name in named}
    return {"text": kind, **{name: alternatives[name] for name in sorted(alternatives, key=lambda name: (name != "released", name))}}
