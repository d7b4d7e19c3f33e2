"""Methods of one's own in a comparison: `package.module:Class`, followed by -released or another for a reading that is not the text's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from expunge.errors import InputError
from expunge.methods import Method, lookup
from expunge.methods.readings import readings
from expunge.training.tuning import Tuning
from expunge.vision.scenarios import Scenario


def canonical(name: str) -> str:
    """The name as rows know it; see `lookup.canonical`."""
    if not lookup.is_path(name):
        return name
    path, reading = _split(name)
    return lookup.canonical(path) + ("" if reading == "text" else f"-{reading}")


def short(name: str) -> str:
    """The class and its reading."""
    return name.rpartition(":")[2]


def builder(name: str) -> Callable[..., Method]:
    path, reading = _split(name)
    builders = readings(lookup.method_class(path))
    if reading not in builders:
        raise InputError("methods", f"the readings of {path} are {', '.join(builders)}", name)
    return builders[reading]


def method(name: str, scenario: Scenario, replayed: Tuning) -> Method:
    """With its defaults, but for the seed; and where its tuning is just `Tuning()`, fine-tuned as the others are."""
    build = builder(name)
    settings: dict[str, Any] = {"seed": replayed.seed} if "seed" in inspect.signature(build).parameters else {}
    if lookup.default_tuning(build) == Tuning():
        settings["tuning"] = None if scenario.remain is None else replayed
    return build(**settings)


def _split(name: str) -> tuple[str, str]:
    """The path of a class, and the reading: `mine.py:Own-released` has "released", `mine.py:Own` "text"."""
    module, _, last = name.rpartition(":")
    kind, _, reading = last.partition("-")
    return f"{module}:{kind}", reading or "text"
