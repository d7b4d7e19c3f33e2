"""The page: results to sections of tables and figures, and those to one HTML file that needs nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from expunge import __version__
from expunge.errors import InputError
from expunge.experiments.cells import REFERENCE
from expunge.experiments.results import Result, load
from expunge.report import figures, measured
from expunge.report.figures import Figure
from expunge.report.page_tables import Table
from expunge.report.parts import EXPERIMENTS, OTHER, PARTS, Experiment
from expunge.report.printed import printed
from expunge.report.provenance import failures, runs, summary
from expunge.report.rows import Setting, Told, average, settings
from expunge.storage import files
from expunge.storage.documents import excerpt, read_json

FOLDER = Path(__file__).parent / "template"
AVERAGED = ("table1", "table2")  # the paper prints means over all its models there
LONG = 40  # a table with more rows than this is folded away
NOTES = "notes.json"  # beside the cells: {experiment: [paragraph, ...]}, what its readers should know

Notes = Mapping[str, Sequence[str]]


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
    notes: Sequence[str] = ()


def write(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """The page of a folder of results, written whole or not at all."""
    found = load(folder)
    if not found:
        raise InputError("results", "must be a folder with results in its cells/", os.fspath(folder))
    return files.write_bytes(out, page(found, os.fspath(folder), read_notes(folder)).encode(errors="replace"))


def read_notes(folder: str | os.PathLike[str]) -> Notes:
    path = Path(folder) / NOTES
    if not path.exists():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise InputError(NOTES, f"{path} must be JSON ({excerpt(error)})") from error
    told = list(found.values()) if isinstance(found, dict) else [None]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in told):
        raise InputError(NOTES, f"{path} must hold lists of texts by experiment")
    return found


def page(results: Iterable[Result], source: str = "", notes: Notes | None = None) -> str:
    """The HTML of results; `notes` are paragraphs for the head of an experiment's section."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    told = [asdict(result) for result in results]
    for each in told:  # what was not masked starts where it was
        if each["masked"] is None and each["history"] and each["cell"]["method"]["name"] != REFERENCE:
            each["masked"] = each["history"][0]
    done, failed = [each for each in told if not each.get("error")], [each for each in told if each.get("error")]
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["table"] = lambda part: isinstance(part, Table)
    shown_sections = [replace(each, notes=(notes or {}).get(each.name, ())) for each in sections(done)]
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


def sections(results: Sequence[Told]) -> list[Section]:
    """One section an experiment: the paper's, then any other, then what belongs to none."""
    names = {name for result in results for name in result["experiments"]}
    own = {f"own-{index}": name for index, name in enumerate(sorted(names - EXPERIMENTS.keys()))}
    made = [
        section(anchor, EXPERIMENTS.get(anchor, Experiment(name, OTHER.text)), [each for each in results if name in each["experiments"]])
        for anchor, name in ({name: name for name in EXPERIMENTS if name in names} | own).items()
    ]
    alone = [result for result in results if not result["experiments"]]
    return [*made, *([section("other", OTHER, alone)] if alone else [])]


def section(name: str, kind: Experiment, results: Sequence[Told]) -> Section:
    found = settings(results)
    if len(found) > 1 and name in AVERAGED:
        found.append(average(found))
    labels = dict.fromkeys(row.label for each in found for row in each.rows)
    styles = {label: index for index, label in enumerate(labels)}
    blocks = [block(f"{name}-{index}", name, kind, setting, styles) for index, setting in enumerate(found) if setting.rows]
    return Section(name, kind.title, kind.text, blocks)


def block(anchor: str, experiment: str, kind: Experiment, setting: Setting, styles: dict[str, int]) -> Block:
    """The parts there are data for, and the names of those there are none for."""
    paper = partial(printed, experiment)
    makers = {
        "accuracies": lambda: measured.accuracies(setting, paper, kind.digits),
        "tradeoff": lambda: figures.tradeoff(setting, f"{anchor}-tradeoff", styles),
        "curves": lambda: figures.curves(setting, f"{anchor}-curves"),
        "nearness": lambda: measured.nearness(setting),
        "stability": lambda: measured.stability(setting, paper),
        "relearning": lambda: measured.relearning(setting),
        "classes": lambda: measured.classes(
            setting, "class_accuracies", "Accuracy by class, %", "At the chosen epoch, mean over the seeds."
        ),
        "destinations": lambda: measured.classes(
            setting, "predicted", "Where the forget samples go, %", "Share of the forget samples given to each class, mean over the seeds."
        ),
        "shares": lambda: figures.shares(setting, f"{anchor}-shares"),
        "ratios": lambda: figures.ratios(setting, f"{anchor}-ratios"),
    }
    wanted: Iterable[str] = kind.parts or PARTS
    if setting.rows[0].averaged:
        wanted = [part for part in wanted if part in ("accuracies", "nearness", "stability")]
    elif all(row.cell["method"]["name"] == REFERENCE for row in setting.rows):  # asked for to compare with: there is no method to look at
        wanted = ["accuracies"]
    made = {part: makers[part]() for part in wanted}
    return Block(
        setting.title, [part for part in made.values() if part is not None], [PARTS[part] for part, it in made.items() if it is None]
    )
