"""Read pickles of numbers, text, lists, dicts and byte arrays without running their code, and in memory bounded by their size.

Python's reader does what a file says: a memo of any size, room for strings before the first byte of them is read. This one knows the
instructions that Python 2 and 3 write for such values (protocols 2 to 4) and no others, counts them, and takes every byte from the file.
Not even numpy sees what the file says about an array: shape, type and bytes are noted, checked, and put together here.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy

from expunge.storage.documents import excerpt

OPERATIONS = 1_000_000  # five times what the largest file, CIFAR-100's, has; Python 3 takes twice as many for the same
LONGEST = 8  # bytes of a whole number
DIMENSIONS = 32


class ForbiddenPickle(pickle.UnpicklingError):
    """The pickle names something that a dataset does not hold."""


# The functions a pickle may name: called with its arguments, and then perhaps passed a state.
class _Encoded:
    """`_codecs.encode(text, "latin1")`: how Python 3 writes bytes for Python 2."""

    def __new__(cls, *arguments: object) -> Any:
        match arguments:
            case (str(text), "latin1" | b"latin1"):
                return text.encode("latin1")
        raise ForbiddenPickle("only text in latin1 is taken for bytes")


class _Type:
    """`numpy.dtype(name, align, copy)`; its state (byte order, fields) is without meaning for bytes."""

    def __init__(self, name: object = None, *flags: object) -> None:
        if name not in ("u1", b"u1"):
            raise ForbiddenPickle(f"arrays must hold bytes (u1), found {_shown(name)}")

    def build(self, state: object) -> None:
        pass


class _Kind:
    """`numpy.ndarray`, only ever named, never called."""

    def __init__(self, *arguments: object) -> None:
        raise ForbiddenPickle("an array is made by _reconstruct alone")


class _Array:
    """`_reconstruct(ndarray, (0,), b"b")`, then the state (version, shape, type, column-major?, bytes)."""

    def __init__(self, kind: object = None, shape: object = None, code: object = None) -> None:
        self.values: numpy.ndarray[Any, Any] | None = None

    def build(self, state: Any) -> None:
        match state:
            case (_, tuple(shape), _Type(), bool(column_major), bytes(content)) if len(shape) <= DIMENSIONS:
                if all(type(size) is int and size >= 0 for size in shape) and math.prod(shape) == len(content):
                    self.values = numpy.frombuffer(content, numpy.uint8).reshape(shape, order="F" if column_major else "C")
                    return
        raise ForbiddenPickle("an array must be a shape, a type and as many bytes")


ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _Encoded,
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


@dataclass
class _Machine:
    """The stack, the memo and the place in the file of one reading."""

    content: bytes
    place: int = 0
    made: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        for _ in range(OPERATIONS):
            code = self.content[self.place]
            self.place += 1
            if code == STOP:
                (value,) = self.stack
                return value
            operation = OPERATIONS_BY_CODE.get(code)
            if operation is None:
                raise ForbiddenPickle(f"instruction {code:#04x} has no place in a dataset")
            operation(self)
        raise pickle.UnpicklingError(f"more than {OPERATIONS} instructions")

    def take(self, size: int) -> bytes:
        end = self.place + size
        if size < 0 or end > len(self.content):
            raise EOFError("the file ends in the middle")
        taken = self.content[self.place : end]
        self.place = end
        return taken

    def line(self) -> str:
        end = self.content.find(b"\n", self.place, self.place + 100)
        if end < 0:
            raise EOFError("a name must end after 100 characters")
        return self.take(end + 1 - self.place)[:-1].decode("ascii")

    def number(self, form: struct.Struct) -> int:
        place = self.place
        self.place += form.size
        return form.unpack_from(self.content, place)[0]  # an error of its own where the file ends

    def note(self, key: int) -> None:
        if key > len(self.content):
            raise ForbiddenPickle("more is noted than there is")
        self.memo[key] = self.stack[-1]

    def frame(self) -> None:
        if self.number(LONG) > len(self.content) - self.place:
            raise EOFError("the file ends in the middle")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise IndexError("nothing above the mark")
        return self.stack.pop()

    def above_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def reduce(self) -> None:
        arguments, kind = self.pop(), self.pop()
        if not isinstance(arguments, tuple) or not isinstance(kind, type):
            raise ForbiddenPickle("only what makes bytes and arrays may be called")
        value = kind(*arguments)
        self.made += len(value) if isinstance(value, bytes) else 0
        if self.made > len(self.content):
            raise ForbiddenPickle("more bytes are made than the file has")
        self.push(value)

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, _Type | _Array):
            raise ForbiddenPickle("only arrays and their types have a state")
        target.build(state)

    def find(self, module: object, name: object) -> None:
        known = ALLOWED.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if known is None:
            raise ForbiddenPickle(f"{_shown(module)}.{_shown(name)} has no place in a dataset")
        self.push(known)

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError("only a list is appended to")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if not isinstance(self.stack[-1], dict) or len(values) % 2 or not all(isinstance(key, bytes | str) for key in keys):
            raise TypeError("only a dict has entries, by names")
        self.stack[-1].update(zip(keys, values[1::2], strict=True))

    def tuple_of(self, size: int) -> None:
        self.push(tuple(reversed([self.pop() for _ in range(size)])))

    def long(self) -> None:
        size = self.number(BYTE)
        if size > LONGEST:
            raise ForbiddenPickle(f"whole numbers must have at most {LONGEST} bytes")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def protocol(self) -> None:
        if not 2 <= self.number(BYTE) <= 5:
            raise ForbiddenPickle("the protocol must be 2 or newer")


STOP = ord(".")
BYTE, SHORT, SIGNED, UNSIGNED, LONG = (struct.Struct(form) for form in ("B", "<H", "<i", "<I", "<Q"))
Operation = Callable[[_Machine], Any]
OPERATIONS_BY_CODE: dict[int, Operation] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("("): lambda machine: machine.marks.append(len(machine.stack)),
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("K"): lambda machine: machine.push(machine.number(BYTE)),
    ord("M"): lambda machine: machine.push(machine.number(SHORT)),
    ord("J"): lambda machine: machine.push(machine.number(SIGNED)),
    0x8A: _Machine.long,
    ord("U"): lambda machine: machine.push(machine.take(machine.number(BYTE))),  # Python 2's text is bytes
    ord("T"): lambda machine: machine.push(machine.take(machine.number(SIGNED))),
    ord("C"): lambda machine: machine.push(machine.take(machine.number(BYTE))),
    ord("B"): lambda machine: machine.push(machine.take(machine.number(UNSIGNED))),
    0x8E: lambda machine: machine.push(machine.take(machine.number(LONG))),
    0x8C: lambda machine: machine.push(machine.take(machine.number(BYTE)).decode()),
    ord("X"): lambda machine: machine.push(machine.take(machine.number(UNSIGNED)).decode()),
    0x8D: lambda machine: machine.push(machine.take(machine.number(LONG)).decode()),
    ord("]"): lambda machine: machine.push([]),
    ord("}"): lambda machine: machine.push({}),
    ord(")"): lambda machine: machine.push(()),
    ord("t"): lambda machine: machine.push(tuple(machine.above_mark())),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("a"): lambda machine: machine.extend([machine.pop()]),
    ord("e"): lambda machine: machine.extend(machine.above_mark()),
    ord("s"): lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    ord("u"): lambda machine: machine.set_items(machine.above_mark()),
    ord("q"): lambda machine: machine.note(machine.number(BYTE)),
    ord("r"): lambda machine: machine.note(machine.number(UNSIGNED)),
    0x94: lambda machine: machine.note(len(machine.memo)),
    ord("h"): lambda machine: machine.push(machine.memo[machine.number(BYTE)]),
    ord("j"): lambda machine: machine.push(machine.memo[machine.number(UNSIGNED)]),
    ord("c"): lambda machine: machine.find(machine.line(), machine.line()),
    0x93: lambda machine: machine.find(*[machine.pop(), machine.pop()][::-1]),
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
}


def read(content: bytes) -> dict[str, Any]:
    """The dict a pickle holds, its keys as text and its arrays as uint8; `pickle.UnpicklingError` says what is wrong with it."""
    try:
        unpickled = _Machine(content).run()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise pickle.UnpicklingError(f"not a whole pickle ({type(error).__name__}: {error})") from error
    if not isinstance(unpickled, dict):
        raise pickle.UnpicklingError("a dict was expected")
    return {key.decode("latin1") if isinstance(key, bytes) else key: _plain(value) for key, value in unpickled.items()}


def _shown(value: object) -> str:
    """Of text the beginning, of anything else its kind: lists within lists may be longer than memory when they are written out."""
    text = value.decode("latin1") if isinstance(value, bytes) else value
    return excerpt(text, 50) if isinstance(text, str) else type(value).__name__


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, _Array) else value
