"""Draw the pictures of an audit: losses, re-learning, probes by stage, where forgotten samples go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from expunge.audit.findings import Curve, Histogram
from expunge.audit.report import Audit
from expunge.report import svg
from expunge.report.figures import SMALL, Figure, Picture
from expunge.report.page_tables import Cell, Column, Table

Part = TypeVar("Part")

MARKS = {"before": svg.Mark(1, "square"), "after": svg.Mark(0, "circle"), "retrained": svg.Mark(2, "diamond")}
SETS = {"forget": svg.Mark(1, "square"), "remain": svg.Mark(0, "circle"), "held-out": svg.Mark(2, "diamond")}


def figures(audit: Audit) -> list[Figure]:
    made = [losses(audit), relearning(audit), probes(audit), destinations(audit)]
    return [figure for figure in made if figure is not None]


def _mark(network: str) -> svg.Mark:
    return MARKS[network.partition(" ")[0]]


def _legend(marks: Mapping[str, svg.Mark]) -> list[tuple[str, str]]:
    return [(svg.symbol(mark), name) for name, mark in marks.items()]


def losses(audit: Audit) -> Figure:
    """One picture per network: the share of samples by loss, on axes that all of them share."""
    shown = {name: sets for name, sets in _ordered(audit.pictures.losses) if name in ("before", "after", "retrained 1")}
    top = max(_shares(histogram)[1] for sets in shown.values() for histogram in sets.values())
    pictures, rows = [], []
    for name, sets in shown.items():
        edges = next(iter(sets.values())).edges
        every = range(0, len(edges), 6)
        plane = svg.Plane(
            (0, len(edges) - 1), (0, 100 * top * 1.05), ("loss", "% of samples"), x_ticks={bin: f"{edges[bin]:.2g}" for bin in every}
        )
        for part, mark in SETS.items():
            shares, _ = _shares(sets[part])
            plane.line(((bin + 0.5, 100 * share) for bin, share in enumerate(shares)), mark)
            rows += [
                [Cell(f"{name}, {part}"), Cell(f"{edges[bin]:.3g}", edges[bin]), Cell(str(count), count)]
                for bin, count in enumerate(sets[part].counts)
                if count
            ]
        words = f"{name}: losses of forget, remain and held-out samples"
        pictures.append(Picture(plane.picture(f"losses-{name.replace(' ', '-')}", words, "Shares of samples by loss."), name))
    text = (
        "Held-out: test samples of the forgotten labels. A network that never saw the forget data gives them the losses of held-out ones."
    )
    table = Table("Losses", [Column("network and set"), Column("loss from"), Column("samples")], rows)
    return Figure("Losses", text, pictures, table, _legend(SETS))


def _shares(histogram: Histogram) -> tuple[list[float], float]:
    total = max(sum(histogram.counts), 1)
    shares = [count / total for count in histogram.counts]
    return shares, max(shares)


def relearning(audit: Audit) -> Figure | None:
    curves = dict(_ordered(audit.pictures.curves))
    if not curves:
        return None
    unseen = audit.kind == "classes"

    def right(curve: Curve) -> Sequence[float]:
        return curve.unseen if unseen else curve.forget

    rounds = len(next(iter(curves.values())).losses) - 1
    first = svg.Plane((0, rounds), (0, 100), ("round", "% right"), x_ticks=range(rounds + 1))
    high = max(max(curve.losses) for curve in curves.values()) * 1.05 or 1.0
    second = svg.Plane((0, rounds), (0, high), ("round", "loss on forget"), x_ticks=range(rounds + 1))
    for name, curve in curves.items():
        kind = "thin" if name.startswith("retrained") else ""
        first.line(((step, 100 * share) for step, share in enumerate(right(curve))), _mark(name), kind)
        second.line(enumerate(curve.losses), _mark(name), kind)
        for step, share in enumerate(right(curve)):
            first.mark(step, 100 * share, _mark(name), f"{name}: {100 * share:.1f} %")
    rows = [
        [Cell(name), Cell(str(step), step), Cell(f"{100 * share:.1f}", share), Cell(f"{loss:.3f}", loss)]
        for name, curve in curves.items()
        for step, (share, loss) in enumerate(zip(right(curve), curve.losses, strict=True))
    ]
    what = "unseen samples of the forgotten labels" if unseen else "forget samples"
    pictures = [
        Picture(first.picture("relearning", f"Share right of {what} while re-learning", "A line per network."), f"{what}, right"),
        Picture(second.picture("relearning-loss", "Loss on the forget samples while re-learning", "A line per network."), "loss"),
    ]
    table = Table("Re-learning", [Column("network"), Column("round"), Column("% right"), Column("loss")], rows)
    text = "A copy trains on all data for a few steps at a small rate. What comes back sooner than in a retrained network was still there."
    return Figure("Re-learning", text, pictures, table, _legend(_present(audit)))


def probes(audit: Audit) -> Figure | None:
    rows = [measure for measure in audit.measures if measure.name.startswith("probe, ")]
    if not rows:
        return None
    names: dict[float, str] = {place: measure.name.removeprefix("probe, ") for place, measure in enumerate(rows)}
    plane = svg.Plane((-0.5, len(rows) - 0.5), (0, 100), ("", "recall, %"), x_ticks=names)
    cells = []
    for place, measure in enumerate(rows):
        values = {"before": measure.before, "after": measure.after} | {
            f"retrained {number}": interval for number, interval in enumerate(measure.retrained, start=1)
        }
        for name, interval in values.items():
            if interval is None:
                continue
            shift = {"before": -10, "after": 0, "retrained": 10}[name.partition(" ")[0]]
            plane.mark(place, 100 * interval.value, _mark(name), f"{name}: {100 * interval.value:.1f} %", shift=shift)
            ends = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"
            cells.append([Cell(f"{names[place]}, {name}"), Cell(f"{100 * interval.value:.1f}", interval.value), Cell(ends)])
    picture = Picture(plane.picture("probes", "Recall of a linear probe by stage", "Marks per network and stage."))
    text = "A linear classifier fitted to the outputs at each stage. High values alone say nothing: compare with the retrained networks."
    table = Table("Probes", [Column("stage and network"), Column("recall, %"), Column("95 % interval")], cells)
    return Figure("Probe by stage", text, [picture], table, _legend(_present(audit)))


def destinations(audit: Audit) -> Figure:
    rows = [measure for measure in audit.measures if measure.side == "where"]
    names = [measure.name.removeprefix("given to class ") for measure in rows]
    pictures, cells = [], []
    for number, network in enumerate(_present(audit)):
        plane = svg.Plane(
            (-0.5, len(rows) - 0.5),
            (0, 100),
            ("class", "%"),
            SMALL,
            x_ticks={place: name for place, name in enumerate(names) if place % (1 + len(names) // 10) == 0},
        )
        for place, measure in enumerate(rows):
            if network == "retrained":
                share = sum(interval.value for interval in measure.retrained) / len(measure.retrained)
            else:
                interval = getattr(measure, network)
                share = 0.0 if interval is None else interval.value
            plane.column(place, 100 * share, 0.8, MARKS[network], f"{names[place]}: {100 * share:.1f} %")
            cells.append([Cell(f"{network}, class {names[place]}"), Cell(f"{100 * share:.1f}", share)])
        pictures.append(Picture(plane.picture(f"where-{number}", f"{network}: where forgotten samples go", "Share by class."), network))
    text = "Share of the forgotten samples given to each class; of a forgotten class, unseen ones. Retrained: the mean."
    return Figure(
        "Where forgotten samples go", text, pictures, Table("Where", [Column("network and class"), Column("%")], cells), small=True
    )


def _present(audit: Audit) -> dict[str, svg.Mark]:
    return {name: mark for name, mark in MARKS.items() if name != "retrained" or audit.retrained}


def _ordered(parts: Mapping[str, Part]) -> Iterable[tuple[str, Part]]:
    """Before, after, then the retrained networks by number: JSON does not keep an order."""

    def place(name: str) -> tuple[int, int]:
        kind, _, number = name.partition(" ")
        return [*MARKS].index(kind), int(number or 0)

    return sorted(parts.items(), key=lambda item: place(item[0]))
