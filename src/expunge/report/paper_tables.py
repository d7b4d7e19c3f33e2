"""Make tables of results: mean ± sd over seeds, the best in bold, the paper's number and the gap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from expunge.experiments.cells import REFERENCE
from expunge.experiments.paper import AVERAGE, ORIGINAL, Number, printed
from expunge.experiments.planned_cells import CLASSES, CONTROL, Entry
from expunge.experiments.plans import Experiment
from expunge.experiments.results import DIVERGED, NO_DATA, Result
from expunge.methods.lookup import distinct_labels
from expunge.report.aggregate import aggregate
from expunge.report.views import FINETUNE, VIEWS, Column

NOT_RUN = "not run"
REFUSED = "refused"
MODELS = 16  # the paper's averages are over four datasets × four networks
COMPARED = ("summary", "evidence")  # views of a comparison
DATASETS = ("cifar10", "cifar100", "mnist", "tiny-imagenet")


@dataclass(frozen=True)
class Value:
    """`mean` and `sd` over `seeds`, in percent unless the column says otherwise; `text` in place of a missing mean.

    `comparable`: whether the gap to the paper's number means anything.
    """

    mean: float | None
    sd: float
    seeds: int
    text: str = ""
    paper: Number | None = None
    best: bool = False
    digits: int = 1
    settled: bool = False
    comparable: bool = True

    @property
    def spread(self) -> bool:
        """Whether the standard deviation is printed."""
        return self.seeds > 1 and not (self.settled and self.sd == 0)

    @property
    def gap(self) -> float | None:
        return None if self.mean is None or self.paper is None or not self.comparable else self.mean - self.paper.value

    @property
    def ours(self) -> str:
        if self.mean is None:
            return self.text
        return f"{self.mean:.{self.digits}f}" + (f" ±{self.sd:.{self.digits}f}" if self.spread else "")

    @property
    def theirs(self) -> str:
        return "" if self.paper is None else f"{as_printed(self.paper.value)} ±{as_printed(self.paper.sd)}"

    @property
    def beside(self) -> str:
        """What stands in brackets beside ours: the paper's number, and the gap to it; "" where ours is missing."""
        return "" if self.mean is None else "; ".join(filter(None, (self.theirs, "" if self.gap is None else f"{self.gap:+.1f}")))


def as_printed(number: float) -> str:
    """With one decimal, and with two where the paper has two."""
    return f"{number:.1f}" if round(number, 1) == number else f"{number:.2f}"


@dataclass(frozen=True)
class Row:
    """`name` is the method's, or "original" for w*; `label` is what is printed; `setting` tells rows of one method and reading apart."""

    section: str
    name: str
    reading: str
    label: str
    values: tuple[Value, ...]
    setting: str = ""


@dataclass(frozen=True)
class Table:
    """`compared`: the paper prints numbers for some of it. `section`: of a table that is one section of an experiment."""

    experiment: str
    view: str
    block: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    section: str = ""

    @property
    def compared(self) -> bool:
        return any(value.paper is not None for row in self.rows for value in row.values)


CHOSEN_ON = {"validation": "validation data", "test": "the test set, as the paper does"}


def tables(experiment: Experiment, entries: Sequence[Entry], results: Mapping[str, Result]) -> list[Table]:
    """Every view of every model, and of their average where there are several; `results` by digest.

    A view by section has a table for each, and no average: other models have few of the rows.
    """
    blocks = list(dict.fromkeys(entry.block for entry in entries))
    parts = {block: [entry for entry in entries if entry.block == block] for block in blocks}
    measured = {entry.block for entry in entries if (result := results.get(entry.cell.digest)) is not None and result.best is not None}
    if len(measured) > 1:
        parts[AVERAGE] = [entry for entry in entries if entry.block in measured]
    return [
        _table(experiment, view, block, members, results, section)
        for block, part in parts.items()
        for view in experiment.views
        for section, members in _split(view, block, part).items()
    ]


def _split(view: str, block: str, entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The entries of each table of a view, by its section; "" where all are in one."""
    if not VIEWS[view].by_section:
        return {"": list(entries)}
    sections = dict.fromkeys(entry.section for entry in entries if block != AVERAGE)
    return {section: [entry for entry in entries if entry.section == section] for section in sections}


def _table(experiment: Experiment, view: str, block: str, entries: Sequence[Entry], results: Mapping[str, Result], part: str) -> Table:
    hidden = {_group(entry) for entry in entries if not _shown(results.get(entry.cell.digest), view)}  # by one seed, so by all
    kept = [entry for entry in entries if _group(entry) not in hidden]
    shown = {entry.cell.digest: results[entry.cell.digest] for entry in kept if entry.cell.digest in results}
    columns = VIEWS[view].columns(list(shown.values()))
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in kept:
        groups.setdefault(_group(entry)[1:], []).append(entry)
    models = list(dict.fromkeys(entry.block for entry in entries))
    comparable = is_comparable(experiment.name, block, len(models))
    kinds = distinct_labels(dict.fromkeys(entry.row for entry in kept))
    notes = dict.fromkeys(filter(None, (VIEWS[view].note, *(column.note for column in columns))))
    rows = []
    for (section, name, reading, setting), members in groups.items():
        of_seeds = [results.get(entry.cell.digest) for entry in members]
        notes |= {f"{name}: {result.error}": None for result in of_seeds if result is not None and result.error is not None}
        theirs = paper_numbers(experiment.name, view, block, section, name)
        by_model = [[results.get(entry.cell.digest) for entry in members if entry.block == model] for model in models]
        rows.append(
            Row(
                "" if part else section,
                name,
                reading,
                ", ".join(filter(None, (_label(name, kinds[name], reading, view), setting))),
                tuple(
                    replace(
                        _average([_value(column, of_seeds, name) for of_seeds in by_model]),
                        paper=theirs.get(column.key),
                        comparable=comparable,
                    )
                    for column in columns
                ),
                setting,
            )
        )
    if any(any(run) and not all(run) for run in ([entry.cell.digest in results for entry in group] for group in groups.values())):
        notes["Not all seeds have run yet; numbers are of those that have."] = None
    if view == "best" and any(row.name == REFERENCE for row in rows):
        notes["Retrain is measured at its last epoch: it was not chosen among several."] = None
    if block == AVERAGE:
        notes[f"The mean over {len(models)} models, {', '.join(models)}; where some have no number, how many have one."] = None
    notes |= dict.fromkeys(_parts_of_datasets(shown.values()))
    if not comparable and any(value.paper for row in rows for value in row.values):
        alone = "" if block == AVERAGE else ", and no number for this one"
        notes[f"The paper prints the average over its {MODELS} models{alone}: no gap."] = None
    on = {result.best.on for result in shown.values() if result.best is not None}
    title = VIEWS[view].title.format(on=" or ".join(CHOSEN_ON[part] for part in sorted(on)) or "nothing yet")
    heading = ", ".join(filter(None, (f"{experiment.name}: {experiment.title}", block, part, title)))
    return Table(experiment.name, view, block, heading, tuple(columns), tuple(_with_best(rows, columns, view)), tuple(notes), part)


def _parts_of_datasets(results: Iterable[Result]) -> list[str]:
    """What to say of datasets of which some classes were at hand, not all."""
    found = {each.cell.dataset: len(by_class) for each in results for by_class in each.class_accuracies.values()}
    whole = {name: CLASSES.get(name, 10) for name in found if name in DATASETS}
    return [
        f"{name}: {found[name]} of its {count} classes, the part that was at hand." for name, count in whole.items() if found[name] < count
    ]


def _group(entry: Entry) -> tuple[str, ...]:
    """What the seeds of a row have in common."""
    return (entry.block, entry.section, entry.row, str(entry.cell.method["reading"]), entry.setting)


def _label(name: str, kind: str, reading: str, view: str) -> str:
    """Before any fine-tuning Finetune is w* itself, as in the paper's table."""
    if name == ORIGINAL and view in COMPARED:
        return "before"
    if name == ORIGINAL or (name == FINETUNE and view == "masked"):
        return "w*"
    return kind if reading == "text" else f"{kind}, {reading}"


def _shown(result: Result | None, view: str) -> bool:
    """What has not run, or was refused, may have the numbers of any view."""
    return result is None or result.error is not None or VIEWS[view].shows(result)


def paper_numbers(experiment: str, view: str, block: str, section: str, name: str) -> dict[str, Number]:
    """What the paper prints; in table 2, which has nothing else, its average beside every model."""
    averaged = experiment == "table2" and block.partition("/")[0] in DATASETS
    return printed(experiment, view, AVERAGE if averaged else block, section, name)


def is_comparable(experiment: str, block: str, models: int) -> bool:
    """Whether the paper's number is over as many models as ours: its averages are over 16, and table 2 has nothing else."""
    return models >= MODELS if block == AVERAGE else experiment != "table2"


def _value(column: Column, results: Sequence[Result | None], row: str) -> Value:
    """The value over the seeds; those that have not run are skipped, and a text in place of a number says why."""
    there = [result for result in results if result is not None]
    values = [value for result in there if (value := column.value(result, row)) is not None]
    if not values:
        failed = next((result.error for result in there if result.error is not None), None)
        if failed is not None:
            return Value(None, 0.0, 0, next((kind for kind in (NO_DATA, DIVERGED) if failed.startswith(kind)), REFUSED))
        return Value(None, 0.0, 0, "–" if there else NOT_RUN)
    if inf in values:
        within = [value for value in values if value != inf]
        return Value(None, 0.0, len(values), "beyond" if not within else f"beyond in {len(values) - len(within)} of {len(values)}")
    scale = 100 if column.percent else 1
    ours = aggregate(values)
    return Value(scale * (ours.mean or 0.0), scale * (ours.sd or 0.0), ours.count, digits=column.digits, settled=column.settled)


def _average(values: Sequence[Value]) -> Value:
    """The mean of the models' means, every model with the same weight, where all of them have one."""
    if len(values) == 1:
        return values[0]
    means = [value.mean for value in values if value.mean is not None]
    if not means:
        return values[0]
    if len(means) < len(values):
        return Value(None, 0.0, 0, f"{len(means)} of {len(values)}")
    return Value(sum(means) / len(means), 0.0, 1, digits=values[0].digits)


def _with_best(rows: Sequence[Row], columns: Sequence[Column], view: str) -> list[Row]:
    """Mark the best method of each section for bold print; the references and the control do not compete."""
    apart = {REFERENCE, ORIGINAL, CONTROL} | ({FINETUNE} if view == "masked" else set())
    marked = [list(row.values) for row in rows]
    for section in {row.section for row in rows}:
        places = [place for place, row in enumerate(rows) if row.section == section and row.name not in apart]
        for number, column in enumerate(columns):
            means = {place: round(mean, 1) for place in places if (mean := marked[place][number].mean) is not None}
            if column.better is not None and len(means) > 1:
                best = max(means.values()) if column.better == "high" else min(means.values())
                for place in (place for place, mean in means.items() if mean == best):
                    marked[place][number] = replace(marked[place][number], best=True)
    return [replace(row, values=tuple(values)) for row, values in zip(rows, marked, strict=True)]


def empty(tables: Sequence[Table]) -> int:
    """The number of values that have not been run."""
    return sum(value.text == NOT_RUN for table in tables for row in table.rows for value in row.values)
