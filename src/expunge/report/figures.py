"""Draw the figures of a setting, each with a title, a description, pictures, a legend, and the numbers as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from expunge.report import svg
from expunge.report.aggregate import mean
from expunge.report.page_tables import Cell, Column, Table, number
from expunge.report.rows import Row, Setting
from expunge.vision.networks import NETWORKS

SMALL = (230, 170)
CROWDED = 20  # epochs; with more a curve has no marks
LINES = {"remain": "", "forget": "dashed"}  # kinds of line
LEGEND = [(svg.stroke(kind), f"{measure}, {kind or 'solid'} line") for measure, kind in LINES.items()]


@dataclass(frozen=True)
class Picture:
    drawing: str
    heading: str = ""
    mark: str = ""
    """The method's, before the heading."""


@dataclass(frozen=True)
class Figure:
    title: str
    text: str
    pictures: Sequence[Picture]
    table: Table
    legend: Sequence[tuple[str, str]] = field(default=())
    """Marks and what they mean."""
    small: bool = False


def _picture(plane: svg.Plane, name: str, row: Row, title: str, description: str) -> Picture:
    """A plane of one method, headed by its mark and label."""
    return Picture(plane.picture(name, f"{row.label}: {title}", description), row.label, svg.symbol(row.mark))


def curves(setting: Setting, name: str) -> Figure | None:
    """One small picture per method: remain and forget accuracy over the epochs, one thin line per seed."""
    rows = [row for row in setting.methods if any(len(result.get("history") or ()) > 1 for result in row.results)]
    if not rows:
        return None
    again = setting.reference("retrained")
    level = None if again is None else mean(again.values("retrained", "remain"))
    pictures, lines = [], []
    for index, row in enumerate(rows):
        mark = row.mark
        runs = [result["history"] for result in row.results if result.get("history")]
        epochs = sorted({step["epoch"] for run in runs for step in run})
        whole = [tick for tick in svg.ticks(0, epochs[-1], 5) if tick == int(tick)]
        plane = svg.Plane((0, epochs[-1]), (-3.0, 103.0), size=SMALL, x_ticks=whole)
        if level is not None:
            plane.level(100 * level)
        means: dict[str, list[float]] = {}
        for measure, kind in LINES.items():
            for run in runs:
                plane.line([(step["epoch"], 100 * step[measure]) for step in run], mark, f"thin {kind}")
            at_epoch = [[100 * step[measure] for run in runs for step in run if step["epoch"] == epoch] for epoch in epochs]
            means[measure] = [mean(values) or 0.0 for values in at_epoch]
            plane.line(zip(epochs, means[measure], strict=True), mark, kind)
            for epoch, value in zip(epochs, means[measure], strict=True) if len(epochs) <= CROWDED else ():
                plane.mark(epoch, value, mark, tip=f"epoch {epoch}: {measure} {value:.1f}")
        description = "; ".join(f"{measure} from {values[0]:.1f} to {values[-1]:.1f} percent" for measure, values in means.items())
        pictures.append(_picture(plane, f"{name}-{index}", row, "accuracy by epoch", description))
        for epoch, remain, forget in zip(epochs, means["remain"], means["forget"], strict=True):
            lines.append([Cell(row.label), Cell(str(epoch), epoch), *(Cell(f"{value:.1f}", value) for value in (remain, forget))])
    return Figure(
        "Accuracy by epoch of fine-tuning",
        "Percent; epoch 0 is before any. Thick: mean over the seeds, thin: each seed. Dotted: remain accuracy of the retrained network.",
        pictures,
        Table("Mean accuracy by epoch, %", [Column("method"), Column("epoch"), Column("remain"), Column("forget")], lines),
        LEGEND,
        small=True,
    )


def ratios(setting: Setting, name: str) -> Figure | None:
    """Accuracies by the share of masked weights, one picture per method."""
    families: dict[tuple[str, str], dict[float, list[Row]]] = {}  # by name too: two user methods may share a label
    for row in setting.methods:
        ratio = row.cell["method"].get("ratio")
        if isinstance(ratio, int | float):
            families.setdefault((row.family, row.cell["method"]["name"]), {}).setdefault(float(ratio), []).append(row)
    families = {key: members for key, members in families.items() if len(members) > 1}
    if not families:
        return None
    stages = {"masked": "masked alone", "best": "chosen epoch"}
    pictures, lines = [], []
    for index, ((label, _), members) in enumerate(families.items()):
        merged = {ratio: Row(label, tuple(result for row in members[ratio] for result in row.results)) for ratio in sorted(members)}
        mark = next(iter(merged.values())).mark
        plane = svg.Plane((0.0, 1.04 * max(merged)), (-3.0, 103.0), ("share of weights masked", "accuracy, %"), (460, 280))
        for stage in stages:
            for measure, kind in LINES.items():
                spots = [(ratio, 100 * value) for ratio, row in merged.items() if (value := mean(row.values(stage, measure))) is not None]
                plane.line(spots, mark, f"thin {kind}" if stage == "masked" else kind)
                for ratio, value in spots if stage == "best" else ():
                    plane.mark(ratio, value, mark, tip=f"ratio {ratio:g}, {stages[stage]}: {measure} {value:.1f}")
        for ratio, row in merged.items():
            cells = [number(row.values(stage, measure)) for stage in stages for measure in LINES]
            lines.append([Cell(row.label), Cell(f"{ratio:g}", ratio), *cells])
        description = f"Ratios from {min(merged):g} to {max(merged):g}; the values are in the table below the figure."
        pictures.append(_picture(plane, f"{name}-{index}", row, "accuracy by ratio", description))
    columns = [Column("method"), Column("ratio"), *(Column(measure, title) for title in stages.values() for measure in LINES)]
    text = "Percent, mean over the seeds. Thick, with marks: at the chosen epoch; thin: masked alone."
    return Figure("Accuracy by mask ratio", text, pictures, Table("Accuracy by mask ratio, %", columns, lines), LEGEND)


def in_order(names: Iterable[str], network: str) -> list[str]:
    """Names of parameters from the first layer to the last, where the network is one of ours: files have them sorted by name."""
    if network not in NETWORKS:
        return list(names)
    with torch.device("meta"):
        order = [name for name, _ in NETWORKS[network](10, 3).named_parameters()]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def shares(setting: Setting, name: str) -> Figure | None:
    """One small picture per method: the share of each layer's weights that was masked, in the order of the layers."""
    by_row: dict[Row, dict[str, float]] = {}
    for row in setting.rows:
        masked = [result["masked_share"] for result in row.results if result.get("masked_share")]
        names = in_order(masked[0], str(row.cell.get("network"))) if masked else []
        layers = {key: 100 * (mean([share.get(key, 0.0) for share in masked]) or 0.0) for key in names}
        if any(layers.values()):
            by_row[row] = layers
    if not by_row:
        return None
    pictures = []
    for index, (row, layers) in enumerate(by_row.items()):
        top, mark = max(layers.values()), row.mark
        plane = svg.Plane((0.0, float(len(layers))), (0.0, 1.05 * top), size=SMALL, x_ticks=[])
        for place, (key, value) in enumerate(layers.items()):
            plane.column(place + 0.5, value, 0.8, mark, f"{key}: {value:.2f} %")
        largest = max(layers, key=lambda key: layers[key])
        description = f"{len(layers)} tensors in the order of the network; most in {largest}, {top:.1f} percent."
        pictures.append(_picture(plane, f"{name}-{index}", row, "share of weights changed by layer", description))
    lines = [
        [Cell(key), Cell(row.label), Cell(f"{layers[key]:.2f}", layers[key])]
        for key in dict.fromkeys(key for layers in by_row.values() for key in layers)
        for row, layers in by_row.items()
        if layers.get(key)
    ]
    return Figure(
        "Share of weights masked, or changed at once, by layer",
        "Percent of each tensor's weights, from the first layer on the left to the last on the right, mean over the seeds; "
        "each picture has its own scale.",
        pictures,
        Table(
            "Share of weights masked, or changed at once, %",
            [Column("layer"), Column("method"), Column("share")],
            lines,
            note="What is not here is 0.",
            kind="long",
        ),
        small=True,
    )
