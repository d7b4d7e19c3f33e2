"""Make tables for the page: rows of cells with a text, a value to sort by, and the paper's number beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from expunge.experiments.paper import Number
from expunge.report import svg
from expunge.report.aggregate import aggregate
from expunge.report.rows import Row

BETTER = {"remain": 1, "unlearn_score": 1, "forget": -1, "Δ": -1}  # more, or less


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
    mark: str = ""
    """The method's, before the text."""
    details: Sequence[str] = ()
    """Lines in small below the text."""


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
    folded: bool = False

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings over neighbouring columns, and how many each covers; none without any."""
        groups: list[tuple[str, int]] = []
        for column in self.columns:
            if groups and groups[-1][0] == column.group:
                groups[-1] = (column.group, groups[-1][1] + 1)
            else:
                groups.append((column.group, 1))
        return groups if any(name for name, _ in groups) else []


@dataclass(frozen=True)
class Printed:
    """The paper's number in percent, and why ours is not comparable with it; "" where it is."""

    number: Number
    reason: str = ""


# The paper's number for a row, a view ("masked", "best", "stability", "before") and a measure.
Paper = Callable[[Row, str, str], Printed | None]


def heading(row: Row) -> Cell:
    """The label of a row behind its method's mark; the network before has none."""
    if row.network == "before":
        return Cell(row.label)
    return Cell(row.label, mark=svg.symbol(row.mark))


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def number(values: Sequence[float], digits: int = 1, scale: float = 100, averaged: bool = False) -> Cell:
    """Mean and standard deviation over the seeds."""
    ours = aggregate(values)
    if ours.mean is None:
        return Cell("–")
    spread = "" if ours.sd is None or averaged else f" ± {scale * ours.sd:.{digits}f}"
    return Cell(f"{scale * ours.mean:.{digits}f}{spread}", scale * ours.mean)


def beside(ours: Cell, paper: Printed | None, measure: str, digits: int = 1) -> Cell:
    """Ours with the paper's number, and the gap where both are comparable; it is short where ours is the worse one."""
    if paper is None or ours.value is None:
        return ours
    theirs = paper.number
    gap = round(ours.value - theirs.value, digits) + 0.0  # not -0.0
    ours = replace(ours, paper=f"{theirs.value:.{digits}f} ± {theirs.sd:.{digits}f}")
    return ours if paper.reason else replace(ours, gap=f"{gap:+.{digits}f}".replace("-", "−"), short=BETTER.get(measure, 0) * gap < 0)
