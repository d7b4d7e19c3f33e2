"""Pickles of numbers, text, lists, dicts and byte arrays; anything else in them is refused, and nothing of theirs is ever run.

Not even numpy sees what the file says about an array: shape, type and bytes are noted, checked, and put together here.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy


class ForbiddenPickle(pickle.UnpicklingError):
    """The pickle names something that a dataset does not hold."""


# What a pickle may name is one of these classes. Each has __setstate__, so that a pickle cannot set attributes on the class itself.
class _Encoded:
    """`_codecs.encode(text, "latin1")`: how Python 3 writes bytes for Python 2."""

    def __new__(cls, text: object, encoding: object) -> Any:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise ForbiddenPickle("only text in latin1 is taken for bytes")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise ForbiddenPickle("bytes have no state")


class _Type:
    """`numpy.dtype(name, align, copy)`; its state (byte order, fields) is without meaning for bytes."""

    def __init__(self, name: object, *flags: object) -> None:
        if name not in ("u1", b"u1"):
            raise ForbiddenPickle(f"arrays must hold bytes (u1), found {name!r}")

    def __setstate__(self, state: object) -> None:
        pass


class _Kind:
    """`numpy.ndarray`, only ever named, never called."""

    def __init__(self) -> None:
        raise ForbiddenPickle("an array is made by _reconstruct alone")

    def __setstate__(self, state: object) -> None:
        raise ForbiddenPickle("an array is made by _reconstruct alone")


class _Array:
    """`_reconstruct(ndarray, (0,), b"b")`, then the state (version, shape, type, column-major?, bytes)."""

    def __init__(self, kind: object, shape: object, code: object) -> None:
        self.values: numpy.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, column_major, content = state
        if not isinstance(kind, _Type) or not isinstance(content, bytes) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ForbiddenPickle("an array must be a shape, a type and bytes")
        self.values = numpy.frombuffer(content, numpy.uint8).reshape(shape, order="F" if column_major else "C")


ALLOWED = {
    ("_codecs", "encode"): _Encoded,
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = ALLOWED.get((module, name))
        if found is None:
            raise ForbiddenPickle(f"{module}.{name} has no place in a dataset")
        return found


def read(content: bytes) -> dict[str, Any]:
    """The dict a pickle holds, its keys as text and its arrays as uint8; `pickle.UnpicklingError` says what is wrong with it."""
    try:
        held = _Reader(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise pickle.UnpicklingError(f"not a whole pickle ({type(error).__name__}: {error})") from error
    if not isinstance(held, dict):
        raise pickle.UnpicklingError("a dict was expected")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): _plain(value) for key, value in held.items()}


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, _Array) else value
