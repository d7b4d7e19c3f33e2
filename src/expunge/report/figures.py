"""The figures of a setting: each a title, what it shows in words, pictures, a legend, and the numbers as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from expunge.report import svg
from expunge.report.page_tables import Cell, Column, Table, number, percent
from expunge.report.rows import Row, Setting, family, flat, mean
from expunge.vision.networks import NETWORKS

SMALL = (230, 170)
NEAR = 0.06  # the close-up shows this much around the retrained network
MARK = 11  # about as wide as one, in the picture
CROWDED = 20  # epochs; with more a curve has no marks
REMAIN, FORGET = 0, 1  # styles of the two accuracies where they are lines


@dataclass(frozen=True)
class Picture:
    drawing: str
    heading: str = ""


@dataclass(frozen=True)
class Figure:
    title: str
    text: str
    pictures: Sequence[Picture]
    table: Table
    legend: Sequence[tuple[str, str]] = field(default=())
    """Marks and what they mean."""
    small: bool = False


def tradeoff(setting: Setting, name: str, styles: Mapping[str, int]) -> Figure | None:
    """Remain against forget accuracy, a mark a method and seed; then the corner around the retrained network, enlarged."""
    points = [
        (row.label, result["cell"].get("seed"), 100 * told["forget"], 100 * told["remain"])
        for row in setting.rows
        for result in row.results
        if (told := result.get("best") or result.get("last") or result.get("masked"))
    ]
    if not points:
        return None
    ends = {end: Row(end, tuple(setting.results)) for end in ("before", "retrained")}
    centres = {
        end: (100 * x, 100 * y)
        for end, row in ends.items()
        if (x := mean(row.values(end, "forget"))) is not None and (y := mean(row.values(end, "remain"))) is not None
    }
    spots = [*((x, y) for *_, x, y in points), *centres.values()]
    low = min(y for _, y in spots)
    pictures = [_tradeoff_picture(points, centres, (-3.0, 103.0), (_down(low), 101.0), styles, f"{name}-whole", setting.title)]
    if "retrained" in centres:
        x, y = centres["retrained"]
        close = (max(x - 1, -0.5), x + 100 * NEAR), (y - 50 * NEAR, min(y + 50 * NEAR, 101.0))
        inside = [point for point in points if close[0][0] <= point[2] <= close[0][1] and close[1][0] <= point[3] <= close[1][1]]
        if len({label for label, *_ in inside}) > 1:
            heading = f"Close-up around the retrained network: {len(inside)} of {len(points)} marks"
            pictures.append(_tradeoff_picture(points, centres, *close, styles, f"{name}-close", setting.title, heading))
    labels = list(dict.fromkeys(label for label, *_ in points))
    legend = [(svg.symbol(styles[label]), label) for label in labels]
    rows = [[Cell(label), Cell(str(seed), seed), Cell(f"{x:.1f}", x), Cell(f"{y:.1f}", y)] for label, seed, x, y in points]
    return Figure(
        "Remain against forget accuracy",
        "A mark for every method and seed, at the chosen epoch (where nothing is trained: by the mask alone). Up and left is better; "
        "the dotted crosses are the networks before and retrained, mean over the seeds."
        + " In the close-up marks of one spot stand side by side."
        * (len(pictures) > 1),
        pictures,
        Table("Trade-off, a row a run", [Column("method"), Column("seed"), Column("forget, %"), Column("remain, %")], rows),
        legend,
    )


def _down(low: float) -> float:
    return max(-3.0, 10 * (low // 10) - 3)


def _tradeoff_picture(
    points: Sequence[tuple[str, int, float, float]],
    centres: Mapping[str, tuple[float, float]],
    x: tuple[float, float],
    y: tuple[float, float],
    styles: Mapping[str, int],
    name: str,
    title: str,
    heading: str = "",
) -> Picture:
    plane = svg.Plane(x, y, ("forget accuracy, %", "remain accuracy, %"))
    for end, (across, up) in centres.items():
        if plane.holds(across, up):
            plane.cross(across, up, end)
    crowd: dict[tuple[int, int], int] = {}
    for label, seed, across, up in points:
        if plane.holds(across, up):
            spot = round(plane.at(across, up)[0] / MARK), round(plane.at(across, up)[1] / MARK)
            crowd[spot] = crowd.get(spot, -1) + 1
            shift = MARK * crowd[spot] if heading else 0  # in the close-up alone: in the whole plane there are too many
            plane.mark(across, up, styles[label], tip=f"{label}, seed {seed}: remain {up:.1f}, forget {across:.1f}", shift=shift)
    told = f"{len(points)} marks; every value is in the table below the figure."
    return Picture(plane.picture(name, heading or f"{title}: remain against forget accuracy", told), heading)


def curves(setting: Setting, name: str) -> Figure | None:
    """A small picture a method: remain and forget accuracy over the epochs, a thin line a seed."""
    found = [row for row in setting.rows if any(len(result.get("history") or ()) > 1 for result in row.results)]
    if not found:
        return None
    level = mean(Row("", tuple(setting.results)).values("retrained", "remain"))
    pictures, lines = [], []
    for index, row in enumerate(found):
        runs = [result["history"] for result in row.results if result.get("history")]
        epochs = sorted({step["epoch"] for run in runs for step in run})
        whole = [tick for tick in svg.ticks(0, epochs[-1], 5) if tick == int(tick)]
        plane = svg.Plane((0, epochs[-1]), (-3.0, 103.0), size=SMALL, x_ticks=whole)
        if level is not None:
            plane.level(100 * level)
        means: dict[str, list[float]] = {}
        for measure, style, kind in (("remain", REMAIN, ""), ("forget", FORGET, "dashed")):
            for run in runs:
                plane.line([(step["epoch"], 100 * step[measure]) for step in run], style, f"thin {kind}")
            at_epoch = [[100 * step[measure] for run in runs for step in run if step["epoch"] == epoch] for epoch in epochs]
            means[measure] = [sum(values) / len(values) for values in at_epoch]
            plane.line(zip(epochs, means[measure], strict=True), style, kind)
            for epoch, value in zip(epochs, means[measure], strict=True) if len(epochs) <= CROWDED else ():
                plane.mark(epoch, value, style, tip=f"epoch {epoch}: {measure} {value:.1f}")
        said = "; ".join(f"{measure} from {told[0]:.1f} to {told[-1]:.1f} percent" for measure, told in means.items())
        pictures.append(Picture(plane.picture(f"{name}-{index}", f"{row.label}: accuracy by epoch", said), row.label))
        for epoch, remain, forget in zip(epochs, means["remain"], means["forget"], strict=True):
            lines.append([Cell(row.label), Cell(str(epoch), epoch), *(Cell(f"{value:.1f}", value) for value in (remain, forget))])
    return Figure(
        "Accuracy by epoch of fine-tuning",
        "Percent; epoch 0 is before any. Thick: mean over the seeds, thin: each seed. Dotted: remain accuracy of the retrained network.",
        pictures,
        Table("Mean accuracy by epoch, %", [Column("method"), Column("epoch"), Column("remain"), Column("forget")], lines),
        [(svg.symbol(REMAIN), "remain, solid line"), (svg.symbol(FORGET), "forget, dashed line")],
        small=True,
    )


def ratios(setting: Setting, name: str) -> Figure | None:
    """Accuracies by the share of weights that is masked, one picture a method."""
    families: dict[tuple[str, str], dict[float, list[Row]]] = {}  # by name too: two of one's own may be called alike
    for row in setting.rows:
        ratio = row.cell["method"].get("ratio")
        if isinstance(ratio, int | float):
            families.setdefault((family(flat(row.cell)), row.cell["method"]["name"]), {}).setdefault(float(ratio), []).append(row)
    families = {key: found for key, found in families.items() if len(found) > 1}
    if not families:
        return None
    stages = {"masked": "masked alone", "best": "chosen epoch"}
    pictures, lines = [], []
    for index, ((label, _), found) in enumerate(families.items()):
        order = sorted(found)
        plane = svg.Plane((0.0, 1.04 * order[-1]), (-3.0, 103.0), ("share of weights masked", "accuracy, %"), (460, 280))
        for stage in stages:
            for measure, style in (("remain", REMAIN), ("forget", FORGET)):
                told = {ratio: [value for row in found[ratio] for value in row.values(stage, measure)] for ratio in order}
                spots = [(ratio, 100 * sum(values) / len(values)) for ratio, values in told.items() if values]
                plane.line(spots, style, "dashed" if stage == "masked" else "")
                for ratio, value in spots:
                    tip = f"ratio {ratio:g}, {stages[stage]}: {measure} {value:.1f}"
                    plane.mark(ratio, value, style, hollow=stage == "masked", tip=tip)
        for ratio in order:
            merged = Row(label, tuple(result for row in found[ratio] for result in row.results))
            cells = [number(merged.values(stage, measure)) for stage in stages for measure in ("remain", "forget")]
            lines.append([Cell(label), Cell(f"{ratio:g}", ratio), *cells])
        said = f"Ratios from {order[0]:g} to {order[-1]:g}; the values are in the table below the figure."
        pictures.append(Picture(plane.picture(f"{name}-{index}", f"{label}: accuracy by ratio", said), label))
    columns = [Column("method"), Column("ratio"), *(Column(each, told) for told in stages.values() for each in ("remain", "forget"))]
    legend = [
        (svg.symbol(style, hollow), f"{measure}, {stage}")
        for hollow, stage in ((False, "chosen epoch"), (True, "masked alone, dashed"))
        for measure, style in (("remain", REMAIN), ("forget", FORGET))
    ]
    text = "Percent, mean over the seeds."
    return Figure("Accuracy by mask ratio", text, pictures, Table("Accuracy by mask ratio, %", columns, lines), legend)


def in_order(names: Iterable[str], network: str) -> list[str]:
    """Names of parameters from the first layer to the last, where the network is one of ours: files hold them by name."""
    if network not in NETWORKS:
        return list(names)
    with torch.device("meta"):
        order = [name for name, _ in NETWORKS[network](10, 3).named_parameters()]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def shares(setting: Setting, name: str) -> Figure | None:
    """A small picture a method: the share of each layer's weights that was masked, in the order of the layers."""
    found: list[tuple[Row, dict[str, float]]] = []
    for row in setting.rows:
        told = [result["masked_share"] for result in row.results if result.get("masked_share")]
        names = in_order(told[0], str(row.cell.get("network"))) if told else []
        layers = {key: 100 * sum(each.get(key, 0.0) for each in told) / len(told) for key in names}
        if any(layers.values()):
            found.append((row, layers))
    if not found:
        return None
    pictures = []
    for index, (row, layers) in enumerate(found):
        top = max(layers.values())
        plane = svg.Plane((0.0, float(len(layers))), (0.0, 1.05 * top), size=SMALL, x_ticks=[])
        for place, (key, value) in enumerate(layers.items()):
            plane.column(place + 0.5, value, 0.8, 0, f"{key}: {value:.2f} %")
        most = max(layers, key=lambda key: layers[key])
        said = f"{len(layers)} tensors in the order of the network; most in {most}, {top:.1f} percent."
        pictures.append(Picture(plane.picture(f"{name}-{index}", f"{row.label}: share of weights changed by layer", said), row.label))
    names = list(dict.fromkeys(key for _, layers in found for key in layers))
    columns = [Column("layer"), *(Column(row.label) for row, _ in found)]
    values = [
        [Cell(key), *(Cell(percent(None if key not in layers else layers[key] / 100, 2), layers.get(key)) for _, layers in found)]
        for key in names
    ]
    return Figure(
        "Share of weights masked, or changed at once, by layer",
        "Percent of each tensor's weights, from the first layer on the left to the last on the right, mean over the seeds; "
        "each picture has its own scale.",
        pictures,
        Table("Share of weights masked, or changed at once, %", columns, values),
        small=True,
    )
