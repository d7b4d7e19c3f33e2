"""Check settings where they are passed, so that a wrong one is named at once and not by an error deep inside a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, get_args

from expunge.errors import InputError

LARGEST = 2**63 - 1  # the largest integer torch takes
MAX_EPOCHS = 10**6  # a training's plan is kept in memory, epoch by epoch


def check_number(argument: str, value: Any, low: float, high: float = math.inf, *, ends: str = "[)", rule: str | None = None) -> None:
    """Require a real number between `low` and `high`; `ends` says which of the two are included, as in "[0, 1)"."""
    holds = isinstance(value, Real) and not _is_flag(value) and _fits(value)
    holds = holds and (low < value or (ends[0] == "[" and value == low)) and (value < high or (ends[1] == "]" and value == high))
    if not holds:
        raise InputError(argument, rule or f"must be in {ends[0]}{low}, {high}{ends[1]}", shown(value))


def check_amount(argument: str, value: Any) -> None:
    check_number(argument, value, 0, rule="must be a finite number of at least 0")


def check_positive(argument: str, value: Any) -> None:
    check_number(argument, value, 0, ends="()", rule="must be a positive number")


def is_number(value: Any) -> bool:
    """Whether it is a finite real number."""
    return isinstance(value, Real) and _fits(value) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Whether it is an integer, one of numpy's included; a bool is not."""
    return isinstance(value, Integral) and not _is_flag(value)


def check_whole(argument: str, value: Any, minimum: int | None = None, maximum: int = LARGEST) -> None:
    """Require a whole number from `minimum` to `maximum`, which is at most what torch takes."""
    if not is_whole(value) or (minimum is not None and value < minimum) or abs(int(value)) > maximum:
        limit = maximum if maximum < LARGEST else "2^63 - 1"
        bounds = [] if minimum is None else [f"at least {minimum}"]
        bounds += [f"at most {limit}"] if is_whole(value) and abs(int(value)) > maximum else []
        raise InputError(argument, "must be a whole number" + (f" of {' and '.join(bounds)}" if bounds else ""), shown(value))


def check_seed(argument: str, value: Any) -> None:
    """Require a seed that torch takes."""
    if not is_whole(value) or not -(2**63) <= value < 2**63:
        raise InputError(argument, "must be an integer in [-2^63, 2^63)", shown(value))


def check_flag(argument: str, value: Any) -> None:
    if not _is_flag(value):
        raise InputError(argument, "must be True or False", shown(value))


def check_choice(argument: str, value: Any, choices: Any) -> None:
    """Require one of some strings; `choices` are the strings, or a `Literal` of them."""
    allowed: Iterable[str] = get_args(choices) or choices
    if not isinstance(value, str) or value not in allowed:
        raise InputError(argument, f"must be one of {', '.join(map(repr, allowed))}", shown(value))


def check_builder(argument: str, value: Any, rule: str) -> None:
    """Require a function, or None."""
    if value is not None and not callable(value):
        raise InputError(argument, rule, shown(value))


def make_plain(settings: Any) -> None:
    """Make numpy's numbers and fractions Python's own: torch does not take all of them, and their `repr` goes into stored settings."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        plain = plain_number(value)
        if plain is not value:
            object.__setattr__(settings, field.name, plain)


def plain_number(value: Any) -> Any:
    if type(value) in (bool, float) or (type(value) is int and abs(value) <= LARGEST + 1):
        return value
    if _is_flag(value):
        return bool(value)
    if isinstance(value, Integral) and abs(int(value)) <= LARGEST + 1:
        return int(value)
    return float(value) if isinstance(value, Real) and _fits(value) else value


def shown(value: Any) -> int | float | str:
    """Any value as an error shows it: on one line and not too long."""
    plain = int(value) if is_whole(value) else plain_number(value)
    if isinstance(plain, (int, float)):
        return plain
    line = " ".join(repr(value).split())
    return line if len(line) <= 200 else f"{line[:200]}..."


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's


def _fits(value: Any) -> bool:
    """Whether a float can hold it, if only as infinity."""
    try:
        float(value)
    except OverflowError:
        return False
    return True
