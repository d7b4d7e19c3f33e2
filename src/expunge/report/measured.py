"""The tables of a setting: accuracies, distance to the retrained network, bars of stability and re-learn time, shades by class."""

from __future__ import annotations

from collections.abc import Sequence

from expunge.experiments.cells import REFERENCE
from expunge.report import svg
from expunge.report.page_tables import Cell, Column, Paper, Table, beside, number, percent
from expunge.report.rows import Row, Setting, Told, at, mean, place

POISON = "Attack success: share of triggered test images given the attacker's label; the poison's attack, not one on membership."
MEASURES = {"remain": "remain", "forget": "forget", "unlearn_score": "score"}


def chosen_on(results: Sequence[Told]) -> str:
    """Where the chosen epochs were chosen: on which part of the data."""
    parts = sorted({str(part) for part in (at(result, "best", "on") for result in results) if part})
    return " or ".join(parts)


def accuracies(setting: Setting, paper: Paper, digits: int = 1) -> Table:
    """Remain, forget and score: by the masks alone, at the chosen epoch, at the last."""
    part = chosen_on(setting.results)
    stages = {"masked": "Epoch 0: before training", "best": f"Epoch chosen on {part or 'unknown'} data", "last": "Last epoch"}
    there = [stage for stage in stages if any(row.values(stage, "remain") for row in setting.rows)]
    seeds = {len(row.results) for row in setting.rows}
    counted = len(seeds) > 1  # else it is said once
    columns = [Column("method"), *[Column("runs")] * counted]
    for stage in there:
        columns += [Column(title, stages[stage]) for title in MEASURES.values()]
        columns += [Column("epoch", stages[stage])] * (stage == "best")

    def line(row: Row) -> list[Cell]:
        cells = [Cell(row.label), *[Cell(str(len(row.results)), len(row.results))] * counted]
        for stage in there:
            for measure in MEASURES:
                ours = number(row.values(stage, measure), digits, averaged=row.averaged)
                cells.append(beside(ours, paper(row, stage, measure), measure, digits))
            if stage == "best":
                epoch = number(row.values("best", "epoch"), scale=1, averaged=row.averaged)
                cells.append(beside(epoch, paper(row, stage, "epochs"), "epochs"))
        return cells

    def reference(path: str) -> list[Cell]:
        row = Row(path, tuple(_once(setting.results, path)), averaged=setting.rows[0].averaged)
        cells = [Cell(path), *[Cell(str(len(row.results)), len(row.results))] * counted]
        for stage in there:
            for measure in MEASURES:
                ours = number(row.values(path, measure), digits, averaged=row.averaged)
                theirs = paper(row, "before", measure) if path == "before" and stage == there[0] else None
                cells.append(beside(ours, theirs, measure, digits))
            cells += [Cell("")] * (stage == "best")
        return cells

    tested = " The epoch was chosen on the same test data the accuracies are of, as the paper does: they flatter." if "test" in part else ""
    spreads = "" if setting.rows[0].averaged else " ± standard deviation"
    over = "One run each" if seeds == {1} else f"Mean{spreads} over {'the runs' if counted else f'{max(seeds)} runs'}"
    return Table(
        "Accuracies, %",
        columns,
        [line(row) for row in setting.rows],
        [reference(path) for path in ("before", "retrained") if _once(setting.results, path)],
        f"{over}. Score: remain / (1 + forget).{tested}",
    )


def _once(results: Sequence[Told], path: str) -> list[Told]:
    """One result for each network of that kind: methods share the network they start from and the retrained one."""
    found: dict[str, Told] = {}
    for result in results:
        if at(result, path, "remain") is not None:
            cell = result["cell"]
            found.setdefault(at(result, "weights", path) or f"{place(cell)} {cell.get('seed')}", result)
    return list(found.values())


def nearness(setting: Setting) -> Table | None:
    """How near a method came to the retrained network, the success of the attack that the poison was for, and the seconds."""
    kinds = [
        ("same class as retrained, %", ("agreement",), 100.0, 1),
        ("same, remain %", ("agreement_by", "remain"), 100.0, 1),
        ("same, forget %", ("agreement_by", "forget"), 100.0, 1),
        ("KL from retrained", ("divergence",), 1.0, 3),
        ("KL, remain", ("divergence_by", "remain"), 1.0, 3),
        ("KL, forget", ("divergence_by", "forget"), 1.0, 3),
        ("attack success, %", ("attack",), 100.0, 1),
        ("seconds of work", ("work_seconds",), 1.0, 1),
    ]
    there = [kind for kind in kinds if any(row.values(*kind[1]) for row in setting.rows)]
    if not [kind for kind in there if kind[1] != ("work_seconds",)]:
        return None

    def reference(path: str) -> list[Cell]:
        row = Row(path, tuple(_once(setting.results, path)))
        exact = {"agreement": Cell("100.0", 100), "divergence": Cell("0.000", 0)} if path == "retrained" else {}
        cells = [number(row.values(path, *where), digits, scale) for _, where, scale, digits in there]
        return [Cell(path), *(exact.get(where[0].removesuffix("_by"), cell) for cell, (_, where, *_) in zip(cells, there, strict=True))]

    return Table(
        "Distance to the retrained network",
        [Column("method"), *(Column(kind[0]) for kind in there)],
        [
            [Cell(row.label), *(number(row.values(*path), digits, scale, row.averaged) for _, path, scale, digits in there)]
            for row in setting.rows
        ],
        [reference(path) for path in ("before", "retrained") if _once(setting.results, path)],
        POISON if any(kind[1] == ("attack",) for kind in there) else "",
    )


def stability(setting: Setting, paper: Paper) -> Table | None:
    """Bars: how much each measure moves from epoch to epoch."""
    found = [row for row in setting.rows if row.values("stability", "unlearn_score")]
    if not found:
        return None
    columns = [Column("method"), *(Column(f"Δ {title}") for title in MEASURES.values())]
    means = {(row.label, each): mean(row.values("stability", each)) or 0.0 for row in found for each in MEASURES}
    longest = max(means.values()) or 1.0

    def line(row: Row) -> list[Cell]:
        cells = [Cell(row.label)]
        for measure in MEASURES:
            ours = number(row.values("stability", measure), averaged=row.averaged)
            told = beside(ours, paper(row, "stability", measure), "Δ")
            drawn = svg.bar(means[row.label, measure] / longest, list(MEASURES).index(measure))
            cells.append(Cell(told.text, told.value, told.paper, told.gap, told.short, drawn))
        return cells

    return Table(
        "Fluctuation during fine-tuning, in points of percent",
        columns,
        [line(row) for row in found],
        note="Mean change from one epoch to the next; shorter bars are steadier. All bars of this table have one scale."
        + (" The paper prints its average over 16 models alone." if any(paper(row, "stability", "remain") for row in found) else ""),
        kind="bars",
    )


def relearning(setting: Setting) -> Table | None:
    """Bars: epochs until the forget loss is the original network's again."""
    found = [(row, [told for told in (result.get("relearn") for result in row.results) if told]) for row in setting.rows]
    found = [(row, told) for row, told in found if told]
    if not found:
        return None
    limit = max(each["limit"] for _, told in found for each in told)
    again = [(row, told) for row, told in found if row.cell["method"]["name"] == REFERENCE]

    def line(label: str, told: Sequence[Told]) -> list[Cell]:
        missed = sum(each["epochs"] is None for each in told)
        centre = sum(each["limit"] if each["epochs"] is None else each["epochs"] for each in told) / len(told)
        text = f"{'over ' * bool(missed)}{centre:.1f}" + (f" ({missed} of {len(told)} never within the limit)" if missed else "")
        return [Cell(label), Cell(text, centre, bar=svg.bar(centre / limit, 0))]

    margins = {(row.cell.get("relearn") or {}).get("margin", 0.0) for row, _ in found}
    goal = (
        "the original's again"
        if margins == {0.0}
        else f"within {' or '.join(f'{margin:g}' for margin in sorted(margins))} of the original's"
    )
    said = "" if again else " The retrained network's own time is not among these results."
    return Table(
        "Re-learn time, epochs on all data",
        [Column("method"), Column("epochs")],
        [line(row.label, told) for row, told in found if (row, told) not in again],
        [line(row.label, told) for row, told in again],
        f"Until the loss on the forget data is {goal}, at most {limit}. "
        "Best is the retrained network's; less: it is still in there." + said,
        "bars",
    )


def classes(setting: Setting, part: str, caption: str, note: str, most: int = 12) -> Table | None:
    """Shaded: a row a network, a column a class; of many classes those that change most."""
    found = [(row.label, average) for row in setting.rows if (average := _mean(row.lists(part, "after")))]
    if not found:
        return None
    first = Row("", tuple(setting.results))
    ends = [(name, average) for name in ("before", "retrained") if (average := _mean(first.lists(part, name)))]
    width = len(found[0][1])
    found, ends = ([each for each in some if len(each[1]) == width] for some in (found, ends))
    base = ends[0][1] if ends else [0.0] * width
    moved = [max(abs((told[index] or 0.0) - (base[index] or 0.0)) for _, told in [*found, *ends]) for index in range(width)]
    shown = sorted(sorted(range(width), key=lambda index: -moved[index])[:most])
    fewer = f" The {len(shown)} of {width} classes that change most." if len(shown) < width else ""

    def line(label: str, told: Sequence[float | None]) -> list[Cell]:
        return [Cell(label), *(Cell(percent(told[index]), told[index], shade=round(55 * (told[index] or 0.0))) for index in shown)]

    columns = [Column("method"), *(Column(str(index), "class") for index in shown)]
    lines, references = [line(*each) for each in found], [line(*each) for each in ends]
    return Table(caption, columns, lines, references, note + fewer, "heat")


def _mean(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean of each place over the lists, None where no list has a number."""
    return [mean([value for value in values if value is not None]) for values in zip(*lists, strict=True)]
