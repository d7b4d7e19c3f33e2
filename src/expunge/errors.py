"""The few exceptions expunge raises for mistakes in what it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExpungeError(Exception):
    """Anything expunge refuses to do."""


class InputError(ExpungeError, ValueError):
    """An argument breaks a rule: `InputError("ratio", "must be in [0, 1)", 1.5)`."""

    def __init__(self, argument: str, rule: str, found: object = None) -> None:
        self.argument, self.rule, self.found = argument, rule, found
        super().__init__(f"{argument}: {rule}" + (f"; found {_readable(found)}" if found is not None else ""))


def _readable(found: object) -> str:
    """Short enough for a line: Python refuses to write out an integer of thousands of digits."""
    if isinstance(found, int) and found.bit_length() > 256:
        return f"a number of {found.bit_length()} bits"
    text = str(found)
    return text if len(text) <= 500 else f"{text[:500]}..."


class MismatchError(ExpungeError, ValueError):
    """Two things that belong to different weights or parameters were put together."""


class ModelError(ExpungeError, ValueError):
    """The model cannot be used this way: its samples depend on each other, it has no such parameter, no head was found."""


class DivergedError(ExpungeError, ArithmeticError):
    """A training or an iteration left the finite numbers; nothing was returned."""


class UncheckedWarning(UserWarning):
    """Something that must hold could not be looked at, and is left to the caller."""


class NoEffectWarning(UserWarning):
    """A mask changed nothing."""


class LostAccuracyWarning(UserWarning):
    """A network that was trained to forget is much worse on the remain data than before."""


@contextmanager
def naming(argument: str) -> Iterator[None]:
    """Within, an error about data is one about this argument: what reads batches does not know where they came from."""
    try:
        yield
    except InputError as error:
        if error.argument not in ("batches", "data"):
            raise
        raise InputError(argument, error.rule, error.found) from error.__cause__ or error
