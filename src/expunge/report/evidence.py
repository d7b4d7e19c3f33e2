"""Show what a network still knows after the last epoch, and what that cost, beside the retrained network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log10

from expunge.experiments.cells import REFERENCE
from expunge.experiments.planned_cells import share_of_retraining
from expunge.report import svg
from expunge.report.aggregate import mean
from expunge.report.figures import SMALL, Figure, Picture
from expunge.report.measured import MEASURES
from expunge.report.page_tables import Cell, Column, Table, heading, number
from expunge.report.rows import Content, Row, Setting, at
from expunge.report.scatter import Point, draw, legend, letters

AFTER = (1, 2, 5)  # epochs of re-learning in the table
TICKS = 8  # the most on the axis of cost
UNSEEN, LOSSES = "relearn_unseen", "relearn_losses"
CURVES = {  # title, what is on the axis, scale
    UNSEEN: ("Re-learning: accuracy on unseen samples of the class", "accuracy on test samples of the class, %", 100.0),
    LOSSES: ("Re-learning: loss on the forget samples", "loss on the forget samples", 1.0),
}


def cost(result: Content) -> float | None:
    return share_of_retraining(at(result, "cell", "method", "name"), at(result, "last", "epoch"), at(result, "cell", "recipe", "epochs"))


def afterwards(setting: Setting) -> Table | None:
    """Accuracies after the last epoch, the attack of a poison, and the cost in epochs and seconds."""
    if not any(row.values("last", "remain") for row in setting.methods):
        return None
    measures = {**MEASURES, **({"attack": "attack success"} if any(row.values("last", "attack") for row in setting.methods) else {})}

    def line(row: Row) -> list[Cell]:
        cells = [heading(row), *(number(row.values(row.network or "last", measure)) for measure in measures)]
        own = [result for result in row.results if row.network is None or (row.retrained and result["cell"]["method"]["name"] == REFERENCE)]
        costs = [share for result in own if (share := cost(result)) is not None]
        seconds = [float(result["work_seconds"]) for result in own if result.get("work_seconds") is not None]
        epochs = number([float(result["last"]["epoch"]) for result in own if result.get("last")], 0, 1)
        return [*cells, *(_settled(cell) for cell in (epochs, number(costs))), number(seconds, scale=1)]

    return Table(
        "After the last epoch, %",
        [Column("method"), *map(Column, measures.values()), Column("epochs"), Column("cost, % of a retraining"), Column("seconds")],
        [line(row) for row in setting.methods],
        [line(row) for row in setting.references],
        "Nothing was chosen among epochs. Score: remain / (1 + forget). Cost: epochs of training over those of a retraining; passes that "
        "compute scores are in the seconds alone. Seconds of the retrained network are those of its training, perhaps beside others.",
    )


def _settled(cell: Cell) -> Cell:
    """Without a spread of zero."""
    text, _, spread = cell.text.partition(" ± ")
    return replace(cell, text=text) if spread and not float(spread) else cell


def known(setting: Setting) -> Table | None:
    """Loss attack, re-learned accuracy, loss and probes, the networks before and retrained on top."""
    rows = [row for row in setting.rows if row.values("evidence", "loss_attack")]
    if not rows:
        return None
    epochs = [epoch for epoch in AFTER if any(_curve_at(row, UNSEEN, epoch) for row in rows)]
    probes = [at(result, "evidence", "probes") or {} for row in rows for result in row.results]
    stages = list(dict.fromkeys(stage for found in probes for stage in found))
    relearned = bool(epochs)

    def line(row: Row) -> list[Cell]:
        cells = [Cell("before") if row.original else heading(row), number(row.values("evidence", "loss_attack"))]
        cells += [number(_curve_at(row, UNSEEN, epoch)) for epoch in epochs]
        cells += [number(_curve_at(row, LOSSES, 0), 2, 1)] * relearned
        return [*cells, *(number(row.values("evidence", "probes", stage)) for stage in stages)]

    references = sorted((row for row in rows if row.original or row.retrained), key=lambda row: row.retrained)
    sentences = [
        "Loss attack: forget samples told from test samples by their loss, area under the curve; 50: they cannot be told apart.",
        "Re-learned: accuracy on test samples of the class after so many epochs of training on all data, the class included." * relearned,
        "Loss: on the forget samples, before that training." * relearned,
        "Probe: share of the test samples of the class that a linear classifier finds at the end of a stage." * bool(stages),
        "The retrained network's numbers are the aim: it knows nothing of what it never saw, and still learns it."
        * any(row.retrained for row in references),
    ]
    return Table(
        "What is still known, %",
        [
            Column("method"),
            Column("loss attack"),
            *(Column(f"{epoch}", "re-learned, after epochs") for epoch in epochs),
            *[Column("loss before")] * relearned,
            *(Column(stage, "probe at the end of") for stage in stages),
        ],
        [line(row) for row in rows if row not in references],
        [line(row) for row in references],
        " ".join(filter(None, sentences)),
    )


def _curve_at(row: Row, measure: str, epoch: int) -> list[float]:
    """A point of each seed's curve that reaches so far, and is finite."""
    curves = [at(result, "evidence", measure) or () for result in row.results]
    return [curve[epoch] for curve in curves if epoch < len(curve) and curve[epoch] is not None]


def against_cost(setting: Setting, name: str) -> Figure | None:
    """How much of the class is back after one epoch of re-learning against the cost, one mark per method and seed."""
    rows = [row for row in setting.rows if _curve_at(row, UNSEEN, 1) and not row.original]
    named = letters(rows)
    points = [
        Point(row, named[row], result["cell"].get("seed"), 100 * share, 100 * curve[1])
        for row in rows
        for result in row.results
        if len(curve := list(at(result, "evidence", UNSEEN) or ())) > 1 and (share := cost(result)) is not None
    ]
    if not points or all(point.row.retrained for point in points):
        return None
    places = _places([point.x for point in points])
    left, right = min(places.values()), max(places.values())
    edge = 0.12 * (right - left) or 0.5
    ticks = _ticks(places)
    labels = ("cost, % of a retraining, logarithmic", "back after one epoch of re-learning, %")
    plane = svg.Plane((left - edge, right + edge), (-3.0, 106.0), labels, x_ticks=ticks)
    retrained = mean([point.y for point in points if point.row.retrained])
    if retrained is not None:
        plane.level(retrained)

    def tip(point: Point) -> str:
        return f"{point.row.label}, seed {point.seed}: {by_place[point.x]:.3g} % of a retraining, {point.y:.1f} % back"

    by_place = {place: share for share, place in places.items()}
    draw(plane, [replace(point, x=places[point.x]) for point in points], tip, apart=True)
    description = f"{len(points)} marks; every value is in the table below the figure."
    return Figure(
        "Evidence against cost",
        "A mark for every method and seed after its last epoch. Across: epochs of training, in percent of a retraining's. Up: accuracy on "
        "unseen samples of the class after one epoch of training on all data. Down and left is better, as far down as the retrained network"
        + (", whose mean is the dotted line." if retrained is not None else ", which is not among these results.")
        + " Marks of one spot stand side by side."
        + " Letters tell settings of one method apart." * any(named.values()),
        [Picture(plane.picture(name, f"{setting.title}: evidence against cost", description))],
        Table(
            "Evidence against cost, a row a run",
            [Column("method"), Column("seed"), Column("cost, %"), Column("back after one epoch, %")],
            [
                [Cell(point.row.label), Cell(str(point.seed), point.seed), *(Cell(f"{x:.1f}", x) for x in (point.x, point.y))]
                for point in points
            ],
        ),
        legend(named),
    )


def _places(costs: Sequence[float]) -> dict[float, float]:
    """Where costs lie on a logarithmic axis; what costs nothing lies half a decade left of the least."""
    least = log10(min((share for share in costs if share > 0), default=100.0))
    return {share: log10(share) if share > 0 else least - 0.5 for share in sorted({*costs})}


def _ticks(places: dict[float, float]) -> dict[float, str]:
    """1, 2 and 5 times the powers of ten, the powers alone where those are too many; and 0, which has no place on such an axis."""
    shares = [share for share in places if share > 0]
    zero = {places[share]: "0" for share in places if share == 0}
    if not shares:
        return zero
    powers = range(int(log10(min(shares)) // 1), int(log10(max(shares)) // 1) + 1)
    edge = 1e-9 + 0.12 * (max(places.values()) - min(places.values()))
    for digits in ((1, 2, 5), (1,)):
        values = [digit * 10.0**power for power in powers for digit in digits]
        within = [value for value in values if log10(min(shares)) - edge * (not zero) <= log10(value) <= log10(max(shares)) + edge]
        if len(within) <= TICKS:
            break
    return zero | {log10(value): f"{value:g}" for value in within}


def relearning_curves(setting: Setting, name: str, measure: str) -> Figure | None:
    """One small picture per method: the curve of re-learning by epoch, the retrained network's in each."""
    title, axis, scale = CURVES[measure]
    rows = [row for row in setting.methods if _curves(row, measure, scale)]
    if not rows:
        return None
    retrained = next((row for row in setting.rows if row.retrained and _curves(row, measure, scale)), None)
    means = {row: _mean_curve(row, measure, scale) for row in [*rows, *([retrained] if retrained else [])]}
    last = max(points[-1][0] for points in means.values())
    pictures = []
    for index, row in enumerate(rows):
        beside = [row] if retrained is None else [row, retrained]
        losses = max(value for member in beside for curve in _curves(member, measure, scale) for _, value in curve)
        highest = 103.0 if measure == UNSEEN else 1.05 * losses or 1.0
        whole = [tick for tick in svg.ticks(0, last, 5) if tick == int(tick)]
        plane = svg.Plane((0, last), (-0.03 * highest, highest), size=SMALL, x_ticks=whole)
        if retrained is not None:
            plane.line(means[retrained], retrained.mark, "dashed")
        for curve in _curves(row, measure, scale):
            plane.line(curve, row.mark, "thin")
        plane.line(means[row], row.mark)
        for epoch, value in means[row]:
            plane.mark(epoch, value, row.mark, tip=f"epoch {epoch}: {value:.3g}")
        (first, before), (end, after) = means[row][0], means[row][-1]
        description = f"From {before:.3g} to {after:.3g} in {end - first} epochs."
        drawing = plane.picture(f"{name}-{index}", f"{row.label}: {title.lower()}", description)
        pictures.append(Picture(drawing, row.label, svg.symbol(row.mark)))
    digits = 1 if measure == UNSEEN else 3
    return Figure(
        title,
        f"{axis[0].upper()}{axis[1:]}, before and after each epoch of training on all data. Thick: mean over the seeds, thin: each seed."
        + " Dashed: the retrained network's mean; what learns faster than that still knew something." * (retrained is not None)
        + " Each picture has its own scale." * (measure == LOSSES),
        pictures,
        Table(
            f"{title}, by epoch",
            [Column("method"), *(Column(str(epoch), "epoch") for epoch in range(last + 1))],
            [[Cell(row.label), *(_value(dict(points).get(epoch), digits) for epoch in range(last + 1))] for row, points in means.items()],
        ),
        small=True,
    )


def _value(value: float | None, digits: int) -> Cell:
    return Cell("–") if value is None else Cell(f"{value:.{digits}f}", value)


def _curves(row: Row, measure: str, scale: float) -> list[list[tuple[int, float]]]:
    """The finite points of each seed's curve, by epoch."""
    curves = [at(result, "evidence", measure) or () for result in row.results]
    points = [[(epoch, scale * value) for epoch, value in enumerate(curve) if value is not None] for curve in curves]
    return [curve for curve in points if curve]


def _mean_curve(row: Row, measure: str, scale: float) -> list[tuple[int, float]]:
    """By epoch the mean over the seeds that have a finite value there."""
    epochs = sorted({epoch for curve in _curves(row, measure, scale) for epoch, _ in curve})
    return [(epoch, scale * (mean(_curve_at(row, measure, epoch)) or 0.0)) for epoch in epochs]
