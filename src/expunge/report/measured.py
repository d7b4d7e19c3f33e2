"""Make the tables of a setting: accuracies, distance to the retrained network, bars of stability and re-learn time, shades by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from expunge.report import svg
from expunge.report.aggregate import mean
from expunge.report.page_tables import Cell, Column, Paper, Table, beside, heading, number, percent
from expunge.report.rows import Content, Row, Setting, at

POISON = "Attack success: share of triggered test images given the attacker's label; the poison's attack, not one on membership."
MEASURES = {"remain": "remain", "forget": "forget", "unlearn_score": "score"}


def chosen_on(results: Sequence[Content]) -> str:
    """The part of the data on which epochs were chosen."""
    parts = sorted({str(part) for part in (at(result, "best", "on") for result in results) if part})
    return " or ".join(parts)


def accuracies(setting: Setting, paper: Paper, digits: int = 1) -> Table:
    """Remain, forget and score: by the masks alone, and at the chosen epoch."""
    part = chosen_on(setting.results)
    stages = {"masked": "Epoch 0: before training", "best": f"Epoch chosen on {part or 'unknown'} data"}
    flattered = " The epoch was chosen on the same test data the accuracies are of, as the paper does: they flatter." * ("test" in part)
    return _accuracies(setting, paper, digits, stages, "Accuracies, %", f" Score: remain / (1 + forget).{flattered}")


def at_the_end(setting: Setting, paper: Paper, digits: int = 1) -> Table | None:
    """The same at the last epoch, where nothing was chosen; the paper prints no such numbers."""
    if not any(row.values("last", "remain") for row in setting.methods):
        return None
    table = _accuracies(setting, paper, digits, {"last": ""}, "Accuracies at the last epoch, without a choice, %")
    return replace(table, folded=True)


def _accuracies(setting: Setting, paper: Paper, digits: int, stages: dict[str, str], caption: str, note: str = "") -> Table:
    there = [stage for stage in stages if any(row.values(stage, "remain") for row in setting.methods or setting.rows)]
    counts = {len(row.results) for row in (*setting.methods, *setting.references)}
    counted = len(counts) > 1  # else the note says it
    columns = [Column("method"), *[Column("runs")] * counted]
    for stage in there:
        columns += [Column(title, stages[stage]) for title in MEASURES.values()]
        columns += [Column("epoch", stages[stage])] * (stage == "best")
    reasons: dict[str, None] = {}

    def compared(ours: Cell, row: Row, view: str, measure: str, digits: int = 1) -> Cell:
        theirs = paper(row, view, measure)
        if theirs is not None and theirs.reason and ours.value is not None:
            reasons[theirs.reason] = None
        return beside(ours, theirs, "" if view == "before" else measure, digits)  # which network one begins with is no merit

    def line(row: Row) -> list[Cell]:
        cells = [heading(row), *[Cell(str(len(row.results)), len(row.results))] * counted]
        for stage in there:
            if row.network and stage != there[0 if row.network == "before" else -1]:  # it has one set of numbers, and they stand once
                cells += [Cell("")] * (len(MEASURES) + (stage == "best"))
                continue
            for measure in MEASURES:
                ours = number(row.values(row.network or stage, measure), digits, averaged=row.averaged)
                cells.append(compared(ours, row, "before" if row.network == "before" else stage, measure, digits))
            if stage == "best":
                trained = row.network != "before" and row.cell["method"]["name"] == row.method  # else its epochs are another method's
                epoch = number(row.values("best", "epoch") if trained else [], scale=1, averaged=row.averaged)
                cells.append(compared(epoch, row, stage, "epochs") if trained else Cell(""))
        return cells

    lines, references = [line(row) for row in setting.methods], [line(row) for row in setting.references]
    spreads = "" if setting.rows[0].averaged else " ± standard deviation"
    over = "One run each" if counts == {1} else f"Mean{spreads} over {'the runs' if counted else f'{max(counts)} runs'}"
    return Table(caption, columns, lines, references, f"{over}.{note}{no_gaps(reasons)}")


def no_gaps(reasons: dict[str, None]) -> str:
    """A note on the paper's numbers that stand without a gap."""
    return f" No gap where numbers are not comparable: {'; '.join(reasons)}." if reasons else ""


def nearness(setting: Setting) -> Table | None:
    """How near a method came to the retrained network, the success of the attack that the poison was for, and the seconds."""
    same, divergence = "same class as retrained, %", "KL divergence from retrained"
    kinds = [
        (Column("all", same), ("agreement",), 100.0, 1),
        (Column("remain", same), ("agreement_by", "remain"), 100.0, 1),
        (Column("forget", same), ("agreement_by", "forget"), 100.0, 1),
        (Column("all", divergence), ("divergence",), 1.0, 3),
        (Column("remain", divergence), ("divergence_by", "remain"), 1.0, 3),
        (Column("forget", divergence), ("divergence_by", "forget"), 1.0, 3),
        (Column("attack success, %"), ("attack",), 100.0, 1),
        (Column("seconds of work"), ("work_seconds",), 1.0, 1),
    ]
    there = [kind for kind in kinds if any(row.values(*kind[1]) for row in setting.methods)]
    if not [kind for kind in there if kind[1] != ("work_seconds",)]:
        return None

    def line(row: Row) -> list[Cell]:
        path = [] if row.network is None else [row.network]
        cells = [number(row.values(*path, *where), digits, scale, row.averaged) for _, where, scale, digits in there]
        exact = {"agreement": Cell("100.0", 100), "divergence": Cell("0.000", 0)} if row.network == "retrained" else {}
        return [heading(row), *(exact.get(where[0].removesuffix("_by"), cell) for cell, (_, where, *_) in zip(cells, there, strict=True))]

    return Table(
        "Distance to the retrained network",
        [Column("method"), *(kind[0] for kind in there)],
        [line(row) for row in setting.methods],
        [line(row) for row in setting.references],
        POISON if any(kind[1] == ("attack",) for kind in there) else "",
    )


def stability(setting: Setting, paper: Paper) -> Table | None:
    """Bars: how much each measure moves from epoch to epoch."""
    rows = [row for row in setting.methods if row.values("stability", "unlearn_score")]
    if not rows:
        return None
    columns = [Column("method"), *(Column(f"Δ {title}") for title in MEASURES.values())]
    means = {(row.label, measure): mean(row.values("stability", measure)) or 0.0 for row in rows for measure in MEASURES}
    longest = max(means.values()) or 1.0
    theirs = {(row.label, measure): paper(row, "stability", measure) for row in rows for measure in MEASURES}

    def line(row: Row) -> list[Cell]:
        cells = [heading(row)]
        for measure in MEASURES:
            ours = beside(number(row.values("stability", measure), averaged=row.averaged), theirs[row.label, measure], "Δ")
            cells.append(replace(ours, bar=svg.bar(means[row.label, measure] / longest, row.mark)))
        return cells

    return Table(
        "Fluctuation during fine-tuning, in points of percent",
        columns,
        [line(row) for row in rows],
        note="Mean change from one epoch to the next; shorter bars are steadier. All bars of this table have one scale."
        + no_gaps({number.reason: None for number in theirs.values() if number is not None and number.reason}),
        kind="bars",
    )


def relearned(row: Row) -> tuple[str, float] | None:
    """Epochs until the forget loss is the original network's again, in words and as a number; None where they were not measured."""
    times = [time for time in (result.get("relearn") for result in row.results) if time]
    if not times:
        return None
    missed = sum(time["epochs"] is None for time in times)
    centre = mean([time["limit"] if time["epochs"] is None else time["epochs"] for time in times]) or 0.0
    return f"{'over ' * bool(missed)}{centre:.1f}" + (f" ({missed} of {len(times)} never within the limit)" if missed else ""), centre


def relearning(setting: Setting) -> Table | None:
    """Bars: epochs until the forget loss is the original network's again."""
    times = {row: time for row in setting.rows if (time := relearned(row))}
    if not times:
        return None
    limit = max(result["relearn"]["limit"] for row in times for result in row.results if result.get("relearn"))
    margins = sorted({(row.cell.get("relearn") or {}).get("margin", 0.0) for row in times})
    goal = "the original's again" if margins == [0.0] else f"within {' or '.join(f'{margin:g}' for margin in margins)} of the original's"
    lines = {row: [heading(row), Cell(text, centre, bar=svg.bar(centre / limit, row.mark))] for row, (text, centre) in times.items()}
    alone = "" if any(row.retrained for row in times) else " The retrained network's own time is not among these results."
    return Table(
        "Re-learn time, epochs on all data",
        [Column("method"), Column("epochs")],
        [line for row, line in lines.items() if not row.retrained],
        [line for row, line in lines.items() if row.retrained],
        f"Until the loss on the forget data is {goal}, at most {limit}. "
        "Best is the retrained network's; less: it is still in there." + alone,
        "bars",
    )


def classes(setting: Setting, part: str, caption: str, note: str, limit: int = 12) -> Table | None:
    """Shaded: one row per network, one column per class; at most `limit` classes, those that change most."""
    lists = {row: _means(row.lists(part, row.network or "after")) for row in (*setting.references, *setting.methods)}
    width = next((len(means) for row, means in lists.items() if means and row.network is None), 0)
    lists = {row: means for row, means in lists.items() if len(means) == width}
    if not width:
        return None
    base = next(iter(lists.values()))
    moved = [max(abs((means[index] or 0.0) - (base[index] or 0.0)) for means in lists.values()) for index in range(width)]
    shown = sorted(sorted(range(width), key=lambda index: -moved[index])[:limit])
    fewer = f" The {len(shown)} of {width} classes that change most." if len(shown) < width else ""
    lines = {
        row: [heading(row), *(Cell(percent(means[index]), means[index], shade=round(55 * (means[index] or 0.0))) for index in shown)]
        for row, means in lists.items()
    }
    columns = [Column("method"), *(Column(str(index), "class") for index in shown)]
    references = [line for row, line in lines.items() if row.network]
    return Table(caption, columns, [line for row, line in lines.items() if not row.network], references, note + fewer, "heat")


def _means(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean at every index over the lists, None where no list has a number."""
    return [mean([value for value in values if value is not None]) for values in zip(*lists, strict=True)]
