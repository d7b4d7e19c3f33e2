"""Rules that settings keep, checked where they are given: a wrong one is named at once, not by an error deep inside a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, get_args

from expunge.errors import InputError


def check_number(argument: str, value: Any, low: float, high: float = math.inf, *, ends: str = "[)", rule: str | None = None) -> None:
    """A real number between `low` and `high`; `ends` says, as in mathematics, which of the two it may be."""
    holds = isinstance(value, Real) and not isinstance(value, bool)
    holds = holds and (low < value or (ends[0] == "[" and value == low)) and (value < high or (ends[1] == "]" and value == high))
    if not holds:
        raise InputError(argument, rule or f"must be in {ends[0]}{low}, {high}{ends[1]}", _shown(value))


def check_amount(argument: str, value: Any) -> None:
    check_number(argument, value, 0, rule="must be a finite number of at least 0")


def check_positive(argument: str, value: Any) -> None:
    check_number(argument, value, 0, ends="()", rule="must be a positive number")


def is_whole(value: Any) -> bool:
    """An integer, of numpy's too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(argument: str, value: Any, least: int | None = None) -> None:
    if not is_whole(value) or (least is not None and value < least):
        raise InputError(argument, "must be a whole number" + ("" if least is None else f" of at least {least}"), _shown(value))


def check_choice(argument: str, value: Any, choices: Any) -> None:
    """One of some strings, given as such or as a `Literal`."""
    allowed: Iterable[str] = get_args(choices) or choices
    if not isinstance(value, str) or value not in allowed:
        raise InputError(argument, f"must be one of {', '.join(map(repr, allowed))}", repr(value))


def _shown(value: Any) -> Any:
    return value if isinstance(value, Real) else repr(value)
