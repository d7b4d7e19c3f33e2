"""Whether what was read from a file is what a dataclass says it is, and its numbers are where they can be."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from expunge.storage.documents import excerpt

LARGEST = 1e100  # of a number: means of its squares are finite too


@dataclass(frozen=True)
class Within:
    """The least and the largest a number may be; none is beyond LARGEST."""

    low: float
    high: float = math.inf


Share = Annotated[float, Within(0, 1)]
Amount = Annotated[float, Within(0)]
Count = Annotated[int, Within(0)]


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def check(value: Any, kind: Any, name: str) -> None:
    """A TypeError that names the part which is not of its kind: a type as annotations have it."""
    if not _is(value, kind, name):
        raise TypeError(f"{name} is {excerpt(value)}")


def _is(value: Any, kind: Any, name: str) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Annotated:
        return _is(value, parts[0], name) and parts[1].low <= value <= parts[1].high
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
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, kind) and not isinstance(value, bool)
