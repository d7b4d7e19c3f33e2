"""Whether what was read from a file is what a dataclass says it is."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def check(value: Any, kind: Any, name: str) -> None:
    """A TypeError that names the part which is not of its kind: a type as annotations have it."""
    if not _is(value, kind, name):
        raise TypeError(f"{name} is {value!r}")


def _is(value: Any, kind: Any, name: str) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, kind):
            return False
        for field in fields(kind):
            check(getattr(value, field.name), _hints(kind)[field.name], field.name)
        return True
    if origin in (Union, types.UnionType):
        return any(_is(value, part, name) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is(key, parts[0], name) and _is(each, parts[1], name) for key, each in value.items())
    if origin in (Sequence, tuple):
        return isinstance(value, list | tuple) and all(_is(each, parts[0], name) for each in value)
    return isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
