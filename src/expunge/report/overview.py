"""Make the summary at the head of the page: a row per model and task, the main methods beside the retrained network and the paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from expunge.experiments.planned_cells import CONTROL
from expunge.experiments.results import NO_DATA
from expunge.report.aggregate import mean
from expunge.report.measured import MEASURES, chosen_on, relearned
from expunge.report.page_tables import Cell, Column, Paper, Table, heading
from expunge.report.printed import printed
from expunge.report.rows import Content, Row, Setting, flat, place, settings

MAIN = (("Finetune", "finetune", "text"), ("FisherMask", "fisher-mask", "text"), ("FisherMask (released)", "fisher-mask", "released"))
NOT_HERE = ("table2",)  # the runs of table 1
BEYOND = "forget"  # the experiment with methods and settings that are not the paper's, on what it forgets
Times = Mapping[tuple[object, ...], Row]


def overview(results: Sequence[Content], experiments: Sequence[str]) -> Table | None:
    """One row for each setting, from the first experiment that has it; the best also from that with methods beyond the paper's.

    Runs without a result count as missing.
    """
    members: dict[str, tuple[str, Setting]] = {}
    for experiment in experiments:
        for setting in settings([result for result in results if experiment in (result["experiments"] or ("",))]):
            if setting.methods and experiment not in NOT_HERE:
                members.setdefault(setting.title, (experiment, setting))
    shown = {family: key for family, *key in MAIN if any(_rows(setting, *key) for _, setting in members.values())}
    if not members:
        return None
    times = {_key(row): row for setting in settings([result for result in results if result.get("relearn")]) for row in setting.rows}
    asked: dict[tuple[str, str], dict[str, None]] = {}  # what any model was run with
    for experiment, setting in members.values():
        asked.setdefault((experiment, _task(setting)), {}).update(dict.fromkeys(row.family for row in setting.rows))
    beyond = [result for result in results if BEYOND in result["experiments"]]
    lines = [
        _line(experiment, setting, _together(setting, beyond), shown, times, asked[experiment, _task(setting)])
        for experiment, setting in members.values()
    ]
    columns = ["before", "retrained", *shown, "best score of all", "missing"]
    chosen = f"; epochs chosen on {part} data" if (part := chosen_on(results)) else ""
    return Table(
        "Remain / forget / score, %",
        [Column("model, and what is forgotten"), *map(Column, columns)],
        lines,
        note=f"Mean over the seeds{chosen}. Remain: accuracy on what is kept. Forget: on what was to go; the retrained network's is the "
        "aim. Score: remain / (1 + forget). Of a method with several settings: the best score. Re-learned in: epochs until the forgotten "
        "is known again; fewer than the retrained network's: hidden, not forgotten.",
        kind="overview",
    )


def _task(setting: Setting) -> str:
    """What is forgotten, whatever the model."""
    return str(setting.rows[0].cell.get("scenario"))


def _together(setting: Setting, others: Iterable[Content]) -> list[Row]:
    """The methods of a setting and those of the other results on it, each result once; labels tell all of them apart."""
    there = {id(result) for result in setting.results}
    return settings([*setting.results, *(one for one in others if place(one["cell"]) == setting.title and id(one) not in there)])[0].methods


def _line(
    experiment: str, setting: Setting, methods: list[Row], shown: Mapping[str, Sequence[str]], times: Times, asked: Iterable[str]
) -> list[Cell]:
    paper: Paper = partial(printed, experiment)
    best = max((row for row in methods if row.method != CONTROL), key=_score, default=None)
    cells = [
        _cell(setting.reference("before") or Row("before", setting.rows[0].results, network="before"), paper, times),
        _cell(setting.reference("retrained") or next((row for row in setting.rows if row.retrained), None), paper, times),
        *(_cell(max(_rows(setting, *key), key=_score, default=None), paper, times) for key in shown.values()),
    ]
    if best is None or not best.values("best", "remain"):
        cells.append(Cell("–"))
    else:
        own = best.results[0] in setting.results  # else the paper's number is of other settings
        cell = _cell(best, paper if own else lambda *_: None, times)
        cells.append(replace(cell, mark=heading(best).mark, details=(best.family, *cell.details)))
    compared = any("paper" in detail for cell in cells for detail in cell.details)
    return [Cell(setting.title), *cells, Cell(_missing(setting, asked, compared))]


def _rows(setting: Setting, name: str, reading: str) -> list[Row]:
    return [row for row in setting.rows if (row.method, row.reading) == (name, reading)]


def _score(row: Row) -> float:
    score = mean(row.values("best", "unlearn_score"))
    return -1.0 if score is None else score


def _key(row: Row) -> tuple[object, ...]:
    """A method as it was set on a setting, measured for re-learn time or not."""
    values = flat(row.cell)
    return place(row.cell), *sorted((name, value) for name, value in values.items() if not name.startswith("relearn"))


def _cell(row: Row | None, paper: Paper, times: Times) -> Cell:
    """Our numbers, and in small print the paper's and the re-learn time."""
    if row is None:
        return Cell("–")
    ours = {measure: mean(row.values(row.network or "best", measure)) for measure in MEASURES}
    theirs = {measure: paper(row, row.network if row.network == "before" else "best", measure) for measure in MEASURES}
    numbers = [f"{100 * value:.1f}" for value in ours.values() if value is not None]
    printed_there = [f"{paper_cell.number.value:.1f}" if paper_cell is not None else "–" for paper_cell in theirs.values()]
    details = [] if row.label == row.family or row.network else [row.label.removeprefix(row.family).removeprefix(", ")]
    details += [f"paper {' / '.join(printed_there)}"] * any(theirs.values())
    time = relearned(times[_key(row)]) if row.network != "before" and _key(row) in times else None
    details += [] if time is None else [f"re-learned in {time[0]}"]
    return Cell(" / ".join(numbers) or "–", ours["unlearn_score"], details=details)


def _missing(setting: Setting, asked: Iterable[str], compared: bool) -> str:
    """Methods without a result, those that another model was run with, and the paper's numbers where it prints none."""
    without = [row for row in setting.rows if not row.values("best", "remain")]
    errors = {str(result["error"]) for row in without for result in row.results}
    why = "no data" if errors and all(error.startswith(NO_DATA) for error in errors) else "no result"
    names = ", ".join(dict.fromkeys(row.family for row in without))
    parts = [f"{why}: {'all methods' if len(without) == len(setting.rows) else names}"] * bool(without)
    not_run = [family for family in asked if family not in {row.family for row in setting.rows}]
    parts += [f"not run: {', '.join(not_run)}"] * bool(not_run)
    return "; ".join([*parts, *["no number in the paper"] * (not compared)])
