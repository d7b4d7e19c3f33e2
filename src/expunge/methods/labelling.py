"""Build methods from a list of methods or names, and give every one a label of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from expunge.errors import InputError
from expunge.methods import Method
from expunge.methods.lookup import method_class
from expunge.validate import shown


def labelled_methods(methods: Any) -> dict[str, Method]:
    rule = "must be methods such as FisherMask(), names such as 'ssd', or a mapping of labels to these"
    if isinstance(methods, (str, bytes)) or not isinstance(methods, Iterable):
        raise InputError("methods", f"{rule}, one or more in a list", shown(methods))
    entries = [*methods.values()] if isinstance(methods, Mapping) else [*methods]
    if not entries:
        raise InputError("methods", rule, "none")
    built = [method_class(entry)() if isinstance(entry, str) else entry for entry in entries]
    for method in built:
        if not callable(method) or isinstance(method, type):
            raise InputError("methods", rule, shown(method))
    labels = [str(label) for label in methods] if isinstance(methods, Mapping) else _names(built)
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise InputError("methods", "must have different labels; give a mapping of labels to methods", f"{repeated[0]} twice")
    return dict(zip(labels, built, strict=True))


def _names(methods: Sequence[Any]) -> list[str]:
    """The class name of every method, with the settings that differ where several have that class."""
    names = []
    for method in methods:
        same_class = [candidate for candidate in methods if type(candidate) is type(method)]
        settings = [field.name for field in fields(method)] if is_dataclass(method) else []
        differing = [name for name in settings if len({repr(getattr(candidate, name)) for candidate in same_class}) > 1]
        name = type(method).__name__ if is_dataclass(method) else getattr(method, "__name__", type(method).__name__)
        names.append(f"{name}({', '.join(f'{setting}={getattr(method, setting)!r}' for setting in differing)})" if differing else name)
    return names
