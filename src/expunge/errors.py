"""Define the exceptions and warnings that expunge raises for a user's mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExpungeError(Exception):
    """The base class of expunge's errors."""


class InputError(ExpungeError, ValueError):
    """An argument breaks a rule: `InputError("ratio", "must be in [0, 1)", 1.5)`."""

    def __init__(self, argument: str, rule: str, found: object = None) -> None:
        self.argument, self.rule, self.found = argument, rule, found
        super().__init__(f"{argument}: {rule}" + (f"; found {_readable(found)}" if found is not None else ""))


def _readable(value: object) -> str:
    """Short enough for a line: Python refuses to write out an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = str(value)
    return text if len(text) <= 500 else f"{text[:500]}..."


class MismatchError(ExpungeError, ValueError):
    """Two things were combined that belong to different weights or parameters."""


class ModelError(ExpungeError, ValueError):
    """The model cannot be used this way: its samples depend on each other, it has no such parameter, or no head."""


class DivergedError(ExpungeError, ArithmeticError):
    """A training or an iteration is no longer finite, or exploded; nothing was returned."""


class UncheckedWarning(UserWarning):
    """Something that must hold could not be checked, and is left to the caller."""


class SlowFisherWarning(UserWarning):
    """Parameters without a closed form take more than a tenth of the work of a Fisher information."""


class NoEffectWarning(UserWarning):
    """A mask changed nothing."""


class LostAccuracyWarning(UserWarning):
    """After the training of a method, the network is much worse on the remain data than before."""


class GoalNotMetWarning(UserWarning):
    """No setting that was tried met the goal; the outcome is the best there was."""


@contextmanager
def naming(argument: str) -> Iterator[None]:
    """Within the context, an error about data names this argument: the code that reads batches does not know where they came from."""
    try:
        yield
    except InputError as error:
        if error.argument not in ("batches", "data"):
            raise
        raise InputError(argument, error.rule, error.found) from error.__cause__ or error
