"""Draw a mark for every run into a plane; letters tell settings of one method apart, and a legend names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from expunge.report import svg
from expunge.report.rows import Row

MARK = 11  # about as wide as one, in the picture
ABREAST = 9  # marks of one spot that stand side by side; further ones begin again at its left


@dataclass(frozen=True)
class Point:
    """A run in the plane; what its axes are is the figure's matter."""

    row: Row
    letter: str
    seed: int
    x: float
    y: float


def letters(rows: Sequence[Row]) -> dict[Row, str]:
    """A letter for each row of a method that has several: they share its mark."""
    return {
        row: "" if len(members) == 1 else ascii_lowercase[place] if place < len(ascii_lowercase) else str(place + 1)
        for members in _families(rows).values()
        for place, row in enumerate(members)
    }


def _families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    return families


def legend(letters: Mapping[Row, str]) -> list[tuple[str, str]]:
    """One entry per method: its settings by their letters."""

    def text(family: str, rows: Sequence[Row]) -> str:
        if len(rows) == 1:
            return family
        return f"{family}: " + "; ".join(f"{letters[row]} {row.label.removeprefix(family).removeprefix(', ') or 'plain'}" for row in rows)

    return [(svg.symbol(rows[0].mark), text(family, rows)) for family, rows in _families(letters).items()]


def draw(plane: svg.Plane, points: Iterable[Point], tip: Callable[[Point], str], apart: bool) -> None:
    """The points that the plane holds; `apart`: with their letters, and marks of one spot side by side."""
    crowd: dict[tuple[int, int], float] = {}  # how far the marks of a spot reach to its right
    for point in points:
        if plane.holds(point.x, point.y):
            across, up = plane.at(point.x, point.y)
            spot = round(across / MARK), round(up / MARK)
            shift = crowd.get(spot, 0.0) if apart else 0.0
            crowd[spot] = shift + MARK * (1.7 if point.letter else 1)
            if crowd[spot] > MARK * ABREAST:
                crowd[spot] = 0.0
            plane.mark(point.x, point.y, point.row.mark, tip(point), shift, point.letter if apart else "")
