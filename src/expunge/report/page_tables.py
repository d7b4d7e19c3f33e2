"""Tables for the page: rows of cells with a text, a value to sort by, and beside it what the paper printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expunge.experiments.paper import Number
from expunge.report.rows import Row, mean, spread


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None
    paper: str = ""
    gap: str = ""
    short: bool = False
    bar: str = ""
    shade: int | None = None
    """Percent of the page's strong colour behind the text."""


@dataclass(frozen=True)
class Column:
    title: str
    group: str = ""


@dataclass(frozen=True)
class Table:
    """The references, rows to compare with, stay on top when the others are sorted. The first cell of a row is its heading."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    references: Sequence[Sequence[Cell]] = ()
    note: str = ""
    kind: str = ""

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings over neighbouring columns, and how many each covers; none without any."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found if any(name for name, _ in found) else []


# The paper's number for a row, a view ("masked", "best", "stability") and a measure, in percent.
Paper = Callable[[Row, str, str], Number | None]


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def number(values: Sequence[float], digits: int = 1, scale: float = 100, averaged: bool = False) -> Cell:
    """Mean and standard deviation over the seeds."""
    centre, width = mean(values), None if averaged else spread(values)
    if centre is None:
        return Cell("–")
    return Cell(f"{scale * centre:.{digits}f}" + ("" if width is None else f" ± {scale * width:.{digits}f}"), scale * centre)


def beside(ours: Cell, paper: Number | None, measure: str, digits: int = 1) -> Cell:
    """Ours with the paper's number and the gap; it is short where ours is the worse one."""
    if paper is None or ours.value is None:
        return ours
    gap = round(ours.value - paper.value, digits) + 0.0  # not -0.0
    short = gap < 0 if measure in ("remain", "unlearn_score") else gap > 0
    return Cell(ours.text, ours.value, f"{paper.value:.{digits}f} ± {paper.sd:.{digits}f}", f"{gap:+.{digits}f}".replace("-", "−"), short)
