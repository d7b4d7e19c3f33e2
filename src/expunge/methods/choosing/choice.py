"""Tell which method was chosen, why, what was tried, and whether the goal was met."""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from expunge.storage.codec import Amount, Count, Share

WIDTH = 80  # columns of the text


@dataclass(frozen=True)
class Tried:
    """A setting that was tried, and what it came to.

    `accuracy` is that on the data that guard the rest, `forget` that on the forget data; `attack` the area under the curve of the loss
    attack, 0.5 where forget samples look as if they were never seen. None: not measured. `result` says it in words.
    """

    method: str
    epochs: Count
    seconds: Amount
    accuracy: Share | None
    forget: Share | None
    attack: Share | None
    result: str


@dataclass(frozen=True)
class Choice:
    """The method that was chosen (its repr), why, and all that was tried; plain data.

    `goal_met` None: all that could be measured is as it should be, and `missing` says what could not be measured. False: `missing` says
    what was not reached, and the outcome is the best there was.
    """

    method: str
    label: str
    reasons: tuple[str, ...]
    goal_met: bool | None
    missing: tuple[str, ...]
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        """One line per finding, however wide: what was chosen, each reason, whether the goal was met."""
        return "\n".join([f"chose {self.label} because", *(f"- {reason}" for reason in self.reasons), self.state()])

    def __repr__(self) -> str:
        return f"Choice({self.label}; {self.state()})"

    def state(self) -> str:
        """Whether the goal was met, and what is missing."""
        head = {True: "goal met", False: "GOAL NOT MET", None: "goal not measured in full"}[self.goal_met]
        return f"{head}: {'; '.join(self.missing)}" if self.missing else head

    def lines(self) -> list[str]:
        """For a terminal, no line longer than it is wide."""
        return [
            *textwrap.wrap(f"chose {self.label} because", WIDTH, subsequent_indent="  ", break_on_hyphens=False),
            *(line for reason in self.reasons for line in _item(reason)),
            *textwrap.wrap(self.state(), WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        ]


def _item(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def brief(settings: Any) -> str:
    """The repr with only those settings that differ from their defaults."""
    if isinstance(settings, type):
        return settings.__name__
    if not is_dataclass(settings):
        return repr(settings)
    shown = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.default is MISSING or value != field.default:
            shown.append(f"{field.name}={brief(value)}")
    return f"{type(settings).__name__}({', '.join(shown)})"
