"""The page: results to sections of tables and figures, and those to one HTML file that needs nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from expunge import __version__, artifacts
from expunge.bench import results as files
from expunge.errors import InputError
from expunge.report import figures, tables
from expunge.report.figures import Figure
from expunge.report.printed import printed
from expunge.report.rows import Setting, Told, at, average, family, flat, place, settings, shown
from expunge.report.tables import Cell, Column, Table

FOLDER = Path(__file__).parent / "template"
LONG = 40  # a table with more rows than this is folded away


@dataclass(frozen=True)
class Experiment:
    """Its title, what it asks, and which parts of the page answer; without parts, all there are data for."""

    title: str
    text: str
    parts: tuple[str, ...] = ()
    digits: int = 1


PARTS = ("accuracies", "tradeoff", "curves", "nearness", "stability", "relearning", "classes", "destinations", "shares", "ratios")
EXPERIMENTS = {
    "table1": Experiment(
        "Table 1: a category is removed",
        "How much of the removed category is left, and what it costs the others.",
        ("accuracies", "tradeoff", "curves", "nearness", "classes", "destinations", "shares"),
    ),
    "table2": Experiment("Table 2: stability", "How much the accuracies move while fine-tuning.", ("stability",)),
    "table3": Experiment(
        "Table 3: poisoned samples are removed",
        "Remain: the test data; forget: the poisoned training samples themselves.",
        ("accuracies", "tradeoff", "curves", "nearness", "shares"),
    ),
    "table4": Experiment(
        "Table 4: wrongly labelled samples are removed",
        "Remain: the test data, which is what the paper prints.",
        ("accuracies", "curves", "nearness"),
        digits=2,
    ),
    "table5": Experiment(
        "Table 5: little remain data, or none",
        "What is left to do when the remain data are gone.",
        ("accuracies", "tradeoff", "curves", "nearness"),
    ),
    "fig-influence": Experiment(
        "Figure 1: fine-tuning and influence are not enough", "The removed category's accuracy while unlearning.", ("curves", "accuracies")
    ),
    "fig-relearn": Experiment(
        "Re-learn time", "How long until the forgotten is known again: a retrained network sets the measure.", ("relearning", "accuracies")
    ),
    "fig-schedule": Experiment("Learning rates of the fine-tuning", "The training's schedule replayed, against constant rates.", ("curves", "accuracies")),
    "fig-ratio": Experiment("Mask ratios", "The more weights are masked, the more is lost.", ("ratios", "curves", "accuracies")),
}
OTHER = Experiment("Other results", "Results that belong to no experiment of the paper.")


@dataclass(frozen=True)
class Block:
    """A setting's part of a section."""

    title: str
    parts: Sequence[Table | Figure]
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    text: str
    blocks: Sequence[Block]


def write(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """The page of a folder of results, written whole or not at all."""
    found = files.load(folder)
    if not found:
        raise InputError("results", "must be a folder with results in its cells/", os.fspath(folder))
    return artifacts.write_bytes(out, page(found, os.fspath(folder)).encode())


def page(results: Iterable[Any], source: str = "") -> str:
    """The HTML of results: `expunge.bench.results.Result`, or mappings of the same form."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    told = [asdict(result) if is_dataclass(result) and not isinstance(result, type) else result for result in results]
    done, failed = [each for each in told if not each.get("error")], [each for each in told if each.get("error")]
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["table"] = lambda part: isinstance(part, Table)
    shown_sections = sections(done)
    return environment.get_template("page.html").render(
        source=source,
        version=__version__,
        summary=summary(done, failed),
        sections=shown_sections,
        absent=[EXPERIMENTS[name].title for name in EXPERIMENTS if name not in {each.name for each in shown_sections}],
        failed=failures(failed),
        runs=runs(told),
        long=LONG,
    )


def summary(done: Sequence[Told], failed: Sequence[Told]) -> list[tuple[str, str]]:
    """The page in a few words."""
    cells = [result["cell"] for result in done]
    seconds = sum(float(result.get("seconds") or 0) for result in [*done, *failed])
    told = {
        "Runs": f"{len(done)} finished" + (f", {len(failed)} without a result" if failed else ""),
        "Data": ", ".join(sorted({str(cell.get("dataset")) for cell in cells})),
        "Networks": ", ".join(sorted({str(cell.get("network")) for cell in cells})),
        "Methods": ", ".join(sorted({family(flat(cell)) for cell in cells})),
        "Seeds": ", ".join(map(str, sorted({cell.get("seed") for cell in cells}, key=str))),
        "Epoch chosen on": f"{chosen} data" if (chosen := tables.chosen_on(done)) else "",
        "Time": f"{seconds:.0f} seconds" if seconds < 600 else f"{seconds / 3600:.1f} hours",
    }
    return [(key, value) for key, value in told.items() if value]


def sections(results: Sequence[Told]) -> list[Section]:
    """One section an experiment: the paper's, then any other, then what belongs to none."""
    names = {name for result in results for name in result.get("experiments") or ()}
    made = []
    for name in [*(each for each in EXPERIMENTS if each in names), *sorted(names - EXPERIMENTS.keys())]:
        kind = EXPERIMENTS.get(name, Experiment(name, OTHER.text))
        made.append(section(name, kind, [result for result in results if name in (result.get("experiments") or ())]))
    if alone := [result for result in results if not result.get("experiments")]:
        made.append(section("other", OTHER, alone))
    return made


def section(name: str, kind: Experiment, results: Sequence[Told]) -> Section:
    found = settings(results)
    if len(found) > 1 and name in ("table1", "table2"):
        found.append(average(found))
    labels = dict.fromkeys(row.label for each in found for row in each.rows)
    styles = {label: index for index, label in enumerate(labels)}
    blocks = [block(f"{name}-{index}", name, kind, setting, styles) for index, setting in enumerate(found) if setting.rows]
    return Section(name, kind.title, kind.text, blocks)


def block(anchor: str, experiment: str, kind: Experiment, setting: Setting, styles: dict[str, int]) -> Block:
    """The parts there are data for, and the names of those there are none for."""
    paper = partial(printed, experiment)
    makers = {
        "accuracies": lambda: tables.accuracies(setting, paper, kind.digits),
        "tradeoff": lambda: figures.tradeoff(setting, f"{anchor}-tradeoff", styles),
        "curves": lambda: figures.curves(setting, f"{anchor}-curves"),
        "nearness": lambda: tables.nearness(setting),
        "stability": lambda: tables.stability(setting, paper),
        "relearning": lambda: tables.relearning(setting),
        "classes": lambda: tables.classes(setting, "class_accuracies", "Accuracy by class, %", "At the chosen epoch, mean over the seeds."),
        "destinations": lambda: tables.classes(
            setting, "predicted", "Where the forget samples go, %", "Share of the forget samples given to each class, mean over the seeds."
        ),
        "shares": lambda: figures.shares(setting, f"{anchor}-shares"),
        "ratios": lambda: figures.ratios(setting, f"{anchor}-ratios"),
    }
    whole = setting.rows[0].averaged
    wanted = [part for part in kind.parts or PARTS if not whole or part in ("accuracies", "nearness", "stability")]
    made = {part: makers[part]() for part in wanted}
    return Block(setting.title, [part for part in made.values() if part is not None], [NAMES[part] for part, it in made.items() if it is None])


NAMES = {
    "accuracies": "accuracies",
    "tradeoff": "the trade-off",
    "curves": "accuracy by epoch",
    "nearness": "the distance to the retrained network",
    "stability": "stability",
    "relearning": "re-learn time",
    "classes": "accuracy by class",
    "destinations": "where the forget samples go",
    "shares": "masked shares",
    "ratios": "accuracy by ratio",
}


def failures(failed: Sequence[Told]) -> Table | None:
    """The runs without a result, and why."""
    if not failed:
        return None
    rows = [[Cell(place(each["cell"])), Cell(family(flat(each["cell"]))), _seed(each), Cell(str(each["error"]))] for each in failed]
    columns = [Column("setting"), Column("method"), Column("seed"), Column("why")]
    return Table("Runs without a result", columns, rows, note="They are in no table and no figure of this page.", kind="text")


def runs(results: Sequence[Told]) -> list[Table]:
    """How it was run: settings of the methods, versions, machines, and every run."""
    methods: dict[tuple[str, str], list[Told]] = {}
    for result in results:
        told = flat(result["cell"])
        details = ", ".join(f"{key.removeprefix('method.').replace('_', ' ')} {value}" for key, value in told.items() if not _named(key))
        methods.setdefault((family(told), details), []).append(result)
    machines: dict[tuple[str, str], int] = {}
    for result in results:
        key = tuple(_pairs(result.get(part) or {}) for part in ("versions", "hardware"))
        machines[key[0], key[1]] = machines.get((key[0], key[1]), 0) + 1
    every = [
        [
            Cell(str(result.get("digest", ""))[:10]),
            Cell(place(result["cell"])),
            Cell(family(flat(result["cell"]))),
            _seed(result),
            tables.number([float(result.get("seconds") or 0)], scale=1),
            *(Cell(str(at(result, "weights", part) or "–")[:10]) for part in ("before", "after", "retrained")),
        ]
        for result in results
    ]
    weights = [Column(part, "digest of the weights") for part in ("before", "after", "retrained")]
    return [
        Table(
            "Settings",
            [Column("method"), Column("settings"), Column("runs"), Column("seconds a run")],
            [
                [Cell(label), Cell(details), Cell(str(len(found)), len(found)), tables.number([float(each.get("seconds") or 0) for each in found], scale=1)]
                for (label, details), found in methods.items()
            ],
            kind="text",
        ),
        Table(
            "Versions and hardware",
            [Column("versions"), Column("hardware"), Column("runs")],
            [[Cell(versions), Cell(hardware), Cell(str(count), count)] for (versions, hardware), count in machines.items()],
            kind="text",
        ),
        Table("Every run", [Column("run"), Column("setting"), Column("method"), Column("seed"), Column("seconds"), *weights], every, kind="text"),
    ]


def _named(key: str) -> bool:
    return key in ("method.name", "method.reading")


def _pairs(told: Told) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in told.items()) or "not told"


def _seed(result: Told) -> Cell:
    seed = result["cell"].get("seed")
    return Cell(str(seed), seed if isinstance(seed, int) else None)
