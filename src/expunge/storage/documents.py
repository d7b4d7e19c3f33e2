"""Read plain files and JSON within limits: whatever a file holds, the result is bounded, finite and printable, or a ValueError says why."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

LARGEST = 2**24  # bytes of a JSON file; a result has 6 kB, a list of all the paper's cells less than 1 MB
VALUES = 500_000  # in one file: an empty list takes three bytes there, and sixty in memory
DEPTH = 32
TOO_DEEP = f"JSON must not be nested deeper than {DEPTH}"
WHOLE = 2**64  # whole numbers are smaller than this: digests and seeds are
DIGITS = 20  # of such a number
DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # SHA-256


def read_plain(path: str | os.PathLike[str], largest: int) -> bytes:
    """The bytes of a plain file of at most `largest` bytes; an OSError where it cannot be read.

    A pipe may never answer, a device never end, and a folder is no file: each is a ValueError, and is not even opened.
    """
    _check_plain(os.stat(path), path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())  # it may have been replaced meanwhile
        _check_plain(status, path)
        if status.st_size > largest:
            raise ValueError(f"must have at most {largest} bytes; {os.fspath(path)} has {status.st_size}")
        return file.read(status.st_size)


def _check_plain(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"must be a plain file; {os.fspath(path)} is a folder, a pipe or a device")


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a plain file of JSON holds."""
    return parse_json(read_plain(path, LARGEST))


def parse_json(content: bytes | str, largest: int = LARGEST) -> Any:
    """JSON in UTF-8 without what Python takes beside it: NaN and infinities, numbers beyond float64 or 64 bits, a name twice in one
    object, halves of characters, any depth."""
    text = content if isinstance(content, str) else content.decode("utf-8")
    if len(text) > largest or text.count(",") + text.count("[") + text.count("{") > VALUES:
        raise ValueError(f"JSON must have at most {largest} bytes and {VALUES} values")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check(value)
    return value


def fingerprinted(text: str) -> str:
    """With the first digits of a digest, called a fingerprint, in place of the whole digest."""
    return DIGEST.sub(r"fingerprint \1", text)


def excerpt(value: object, length: int = 160) -> str:
    """A value of a file, or an error about it, for an error message: on one line, in printable characters, not too long."""
    value = _told(value) if isinstance(value, Exception) else value
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _told(error: Exception) -> str:
    """What an error says, without its class where that says nothing more."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text, kind = " ".join(str(error).split()), type(error).__name__
    return text if text and type(error) in (ValueError, TypeError) else f"{kind}: {text}" if text else kind


def named_number(text: str, largest: int, smallest: int = 0) -> int:
    """A whole number that metadata hold as text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS and smallest <= int(text) <= largest):
        raise ValueError(f"must be a whole number from {smallest} to {largest}; found {excerpt(text)}")
    return int(text)


def _whole(text: str) -> int:
    if len(text) > DIGITS or not -WHOLE < int(text) < WHOLE:
        raise ValueError(f"whole numbers must be smaller than 2^64; found {excerpt(text, 30)}")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite; found {excerpt(text, 30)}")
    return number


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        for name, _ in pairs:
            if named.pop(name, pairs) is pairs:
                raise ValueError(f"an object must not have a name twice; found {excerpt(name, 30)}")
    return named


def _check(value: Any) -> None:
    """Depth and text, without recursion."""
    parts = [(value, 1)]
    while parts:
        part, depth = parts.pop()
        if depth > DEPTH and isinstance(part, dict | list):
            raise ValueError(TOO_DEEP)
        if isinstance(part, str):
            part.encode()  # an error of a ValueError's kind for half a character
        elif isinstance(part, dict):
            parts += [(name, depth) for name in part]
            parts += [(inner, depth + 1) for inner in part.values()]
        elif isinstance(part, list):
            parts += [(inner, depth + 1) for inner in part]
