"""Draw remain against forget accuracy: a mark for every run, and the corner around the retrained network enlarged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from expunge.report import svg
from expunge.report.aggregate import mean
from expunge.report.figures import Figure, Picture
from expunge.report.page_tables import Cell, Column, Table
from expunge.report.rows import Row, Setting

NEAR = 0.06  # the close-up shows this much around the retrained network
MARK = 11  # about as wide as one, in the picture


@dataclass(frozen=True)
class Point:
    """A run in the plane of the trade-off, in percent."""

    row: Row
    letter: str
    seed: int
    forget: float
    remain: float


def tradeoff(setting: Setting, name: str) -> Figure | None:
    """Remain against forget accuracy, one mark per method and seed; then the corner around the retrained network, enlarged."""
    letters = _letters(setting.rows)
    points = [
        Point(row, letters[row], result["cell"].get("seed"), 100 * end["forget"], 100 * end["remain"])
        for row in setting.rows
        for result in row.results
        if (end := result.get("best") or result.get("last") or result.get("masked"))
    ]
    if not points:
        return None
    centres: dict[str, tuple[float, float]] = {}
    for row in (setting.reference("before"), setting.reference("retrained")):
        if row is not None and row.network is not None:
            forget, remain = (mean(row.values(row.network, measure)) for measure in ("forget", "remain"))
            centres[row.network] = 100 * (forget or 0.0), 100 * (remain or 0.0)
    low = min(up for _, up in [*((point.forget, point.remain) for point in points), *centres.values()])
    pictures = [_tradeoff_picture(points, centres, (-3.0, 103.0), (_down(low), 101.0), f"{name}-whole", setting.title)]
    if "retrained" in centres:
        x, y = centres["retrained"]
        close = (max(x - 1, -0.5), x + 100 * NEAR), (y - 50 * NEAR, min(y + 50 * NEAR, 101.0))
        inside = [point for point in points if _within(point.forget, close[0]) and _within(point.remain, close[1])]
        if len({point.row for point in inside}) > 1:
            caption = f"Close-up around the retrained network: {len(inside)} of {len(points)} marks"
            pictures.append(_tradeoff_picture(points, centres, *close, f"{name}-close", setting.title, caption))
    return Figure(
        "Remain against forget accuracy",
        "A mark for every method and seed, at the chosen epoch (where nothing is trained: by the mask alone). Up and left is better; "
        "the dotted crosses are the networks before and retrained, mean over the seeds."
        + " Letters tell settings of one method apart." * any(letters.values())
        + " In the close-up marks of one spot stand side by side." * (len(pictures) > 1),
        pictures,
        Table(
            "Trade-off, a row a run",
            [Column("method"), Column("seed"), Column("forget, %"), Column("remain, %")],
            [
                [Cell(point.row.label), Cell(str(point.seed), point.seed), *(Cell(f"{x:.1f}", x) for x in (point.forget, point.remain))]
                for point in points
            ],
        ),
        _legend(letters),
    )


def _letters(rows: Sequence[Row]) -> dict[Row, str]:
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


def _legend(letters: Mapping[Row, str]) -> list[tuple[str, str]]:
    """One entry per method: its settings by their letters."""

    def text(family: str, rows: Sequence[Row]) -> str:
        if len(rows) == 1:
            return family
        return f"{family}: " + "; ".join(f"{letters[row]} {row.label.removeprefix(family).removeprefix(', ')}" for row in rows)

    return [(svg.symbol(rows[0].mark), text(family, rows)) for family, rows in _families(letters).items()]


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _down(low: float) -> float:
    return max(-3.0, 10 * (low // 10) - 3)


def _tradeoff_picture(
    points: Sequence[Point],
    centres: Mapping[str, tuple[float, float]],
    x: tuple[float, float],
    y: tuple[float, float],
    name: str,
    title: str,
    caption: str = "",
) -> Picture:
    plane = svg.Plane(x, y, ("forget accuracy, %", "remain accuracy, %"))
    for end, (across, up) in centres.items():
        if plane.holds(across, up):
            plane.cross(across, up, end)
    crowd: dict[tuple[int, int], float] = {}  # how far the marks of a spot reach to its right
    for point in points:
        if plane.holds(point.forget, point.remain):
            across, up = plane.at(point.forget, point.remain)
            spot = round(across / MARK), round(up / MARK)
            shift = crowd.get(spot, 0.0) if caption else 0.0  # in the close-up alone: in the whole plane there are too many
            crowd[spot] = shift + MARK * (1.7 if point.letter else 1)
            tip = f"{point.row.label}, seed {point.seed}: remain {point.remain:.1f}, forget {point.forget:.1f}"
            plane.mark(point.forget, point.remain, point.row.mark, tip, shift, point.letter if caption else "")
    description = f"{len(points)} marks; every value is in the table below the figure."
    return Picture(plane.picture(name, caption or f"{title}: remain against forget accuracy", description), caption)
