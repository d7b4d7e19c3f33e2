"""Draw remain against forget accuracy: a mark for every run, and the corner around the retrained network enlarged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expunge.report import svg
from expunge.report.aggregate import mean
from expunge.report.figures import Figure, Picture
from expunge.report.page_tables import Cell, Column, Table
from expunge.report.rows import Setting
from expunge.report.scatter import Point, draw, legend, letters

NEAR = 0.06  # the close-up shows this much around the retrained network


def tradeoff(setting: Setting, name: str) -> Figure | None:
    """Remain against forget accuracy, one mark per method and seed; then the corner around the retrained network, enlarged."""
    named = letters([row for row in setting.rows if not row.original])
    points = [
        Point(row, named[row], result["cell"].get("seed"), 100 * end["forget"], 100 * end["remain"])
        for row in named
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
    low = min(up for _, up in [*((point.x, point.y) for point in points), *centres.values()])
    pictures = [_tradeoff_picture(points, centres, (-3.0, 103.0), (_down(low), 101.0), f"{name}-whole", setting.title)]
    if "retrained" in centres:
        x, y = centres["retrained"]
        close = (max(x - 1, -0.5), x + 100 * NEAR), (y - 50 * NEAR, min(y + 50 * NEAR, 101.0))
        inside = [point for point in points if _within(point.x, close[0]) and _within(point.y, close[1])]
        if len({point.row for point in inside}) > 1:
            caption = f"Close-up around the retrained network: {len(inside)} of {len(points)} marks"
            pictures.append(_tradeoff_picture(points, centres, *close, f"{name}-close", setting.title, caption))
    return Figure(
        "Remain against forget accuracy",
        "A mark for every method and seed, at the chosen epoch (where nothing is trained: by the mask alone). Up and left is better; "
        "the dotted crosses are the networks before and retrained, mean over the seeds."
        + " Letters tell settings of one method apart." * any(named.values())
        + " In the close-up marks of one spot stand side by side." * (len(pictures) > 1),
        pictures,
        Table(
            "Trade-off, a row a run",
            [Column("method"), Column("seed"), Column("forget, %"), Column("remain, %")],
            [
                [Cell(point.row.label), Cell(str(point.seed), point.seed), *(Cell(f"{x:.1f}", x) for x in (point.x, point.y))]
                for point in points
            ],
        ),
        legend(named),
    )


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

    def tip(point: Point) -> str:
        return f"{point.row.label}, seed {point.seed}: remain {point.y:.1f}, forget {point.x:.1f}"

    draw(plane, points, tip, apart=bool(caption))  # in the close-up alone: in the whole plane there are too many
    description = f"{len(points)} marks; every value is in the table below the figure."
    return Picture(plane.picture(name, caption or f"{title}: remain against forget accuracy", description), caption)
