"""Turn frozen dataclasses into plain JSON and back; what comes back has the types and the bounds its annotations name.

A class may have `derived`, the names of properties that its JSON shows beside the fields and that are not read back.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from expunge.storage.documents import excerpt

LARGEST = 1e100  # of a number: means of its squares are finite too
INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf}  # as text: JSON has no such numbers


@dataclass(frozen=True)
class Within:
    """The smallest and the largest a number may be; none is beyond LARGEST, unless `infinite`: then any number but NaN."""

    low: float
    high: float = math.inf
    infinite: bool = False


Share = Annotated[float, Within(0, 1)]
Amount = Annotated[float, Within(0)]
Count = Annotated[int, Within(0)]
Number = Annotated[float, Within(-math.inf, infinite=True)]  # a loss may be infinite


def encode(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists, infinities as text; all else must be plain already. NaN raises a ValueError."""
    if is_dataclass(value):
        names = [*(field.name for field in fields(value)), *getattr(value, "derived", ())]
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [encode(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise ValueError("NaN is no number that a file can hold")
        return "Infinity" if value > 0 else "-Infinity"
    return value


def decode(kind: Any, content: Any, name: str = "content") -> Any:
    """The value of a type, as annotations have it, that JSON content stands for; a TypeError names the part that is not of its type.

    A field that is missing has its default; a name that is no field raises.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return content
    if is_dataclass(kind):
        return _dataclass(kind, content, name)
    if origin in (Union, types.UnionType):
        return _one_of(parts, content, name)
    if origin is Mapping and isinstance(content, Mapping):
        return {decode(parts[0], key, name): decode(parts[1], part, name) for key, part in content.items()}
    if origin in (Sequence, tuple) and isinstance(content, list | tuple):
        return tuple(decode(parts[0], part, name) for part in content)
    if origin is Annotated and getattr(parts[1], "infinite", False) and isinstance(content, str):
        content = INFINITE.get(content, content)
    if not _is_plain(kind, content):
        raise TypeError(f"{name} is {excerpt(content)}")
    return content


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _dataclass(kind: Any, content: Any, name: str) -> Any:
    if not isinstance(content, Mapping):
        raise TypeError(f"{name} is {excerpt(content)}")
    known = {field.name: field for field in fields(kind)}
    if strange := sorted(map(str, content.keys() - known.keys() - {*getattr(kind, "derived", ())})):
        raise TypeError(f"{name} has no {excerpt(strange[0])}")
    for field in known.values():
        if field.name not in content and field.default is MISSING and field.default_factory is MISSING:
            raise TypeError(f"{name} has {field.name}, which is missing")
    hints = _hints(kind)
    return kind(**{field: decode(hints[field], content[field], field) for field in known if field in content})


def _one_of(kinds: Sequence[Any], content: Any, name: str) -> Any:
    if content is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    for kind in others[:-1]:
        try:
            return decode(kind, content, name)
        except TypeError:
            continue
    return decode(others[-1], content, name)


def _is_plain(kind: Any, content: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        plain = _is_number(content) if parts[1].infinite else _is_plain(parts[0], content)
        return plain and bool(parts[1].low <= content <= parts[1].high)
    if origin is Literal:
        return any(type(content) is type(part) and content == part for part in parts)
    if kind is float:
        return _is_number(content) and abs(content) <= LARGEST
    return isinstance(kind, type) and isinstance(content, kind) and (kind is bool or not isinstance(content, bool))


def _is_number(content: Any) -> bool:
    return isinstance(content, int | float) and not isinstance(content, bool)
