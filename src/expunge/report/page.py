"""Write results as a page: sections of tables and figures in one self-contained HTML file."""

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
from expunge.report import evidence, figures, measured
from expunge.report.figures import Figure
from expunge.report.overview import overview
from expunge.report.page_tables import Table
from expunge.report.parts import AFTERWARDS, EXPERIMENTS, MEASURED_IF_ASKED, OTHER, PARTS, Experiment
from expunge.report.printed import printed
from expunge.report.provenance import facts, failures, runs
from expunge.report.rows import Content, Setting, average, settings
from expunge.report.tradeoff import tradeoff
from expunge.storage import files
from expunge.storage.documents import excerpt, read_json

FOLDER = Path(__file__).parent / "template"
AVERAGED = ("table1", "table2")  # the paper prints means over all its models there
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
    """Write the page of a folder of results, whole or not at all."""
    results = load(folder)
    if not results:
        raise InputError("results", "must be a folder with results in its cells/", os.fspath(folder))
    return files.write_bytes(out, page(results, os.fspath(folder), read_notes(folder)).encode(errors="replace"))


def read_notes(folder: str | os.PathLike[str]) -> Notes:
    path = Path(folder) / NOTES
    if not path.exists():
        return {}
    try:
        notes = read_json(path)
    except ValueError as error:
        raise InputError(NOTES, f"{path} must be JSON ({excerpt(error)})") from error
    lists = list(notes.values()) if isinstance(notes, dict) else [None]
    if not all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in lists):
        raise InputError(NOTES, f"{path} must hold lists of texts by experiment")
    return notes


def page(results: Iterable[Result], source: str = "", notes: Notes | None = None) -> str:
    """The HTML of results; `notes` are paragraphs for the head of an experiment's section."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    contents = [asdict(result) for result in results]
    for content in contents:  # what was not masked starts where it was
        if content["masked"] is None and content["history"] and content["cell"]["method"]["name"] != REFERENCE:
            content["masked"] = content["history"][0]
    done, failed = ([content for content in contents if bool(content.get("error")) is error] for error in (False, True))
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["table"] = lambda part: isinstance(part, Table)
    shown_sections = [replace(section, notes=(notes or {}).get(section.name, ())) for section in sections(done)]
    return environment.get_template("page.html").render(
        source=source,
        version=__version__,
        overview=overview(contents, list(names(contents).values())) if done else None,
        facts=facts(done, failed),
        sections=shown_sections,
        absent=_absent({section.name for section in shown_sections}),
        failed=failures(failed),
        runs=runs(contents),
    )


def names(results: Sequence[Content]) -> dict[str, str]:
    """Experiments by the anchor of their section: the paper's, then any others, then "" for results of no experiment."""
    known = {name for result in results for name in result["experiments"]}
    own = {f"own-{index}": name for index, name in enumerate(sorted(known - EXPERIMENTS.keys()))}
    alone = {"other": ""} if any(not result["experiments"] for result in results) else {}
    return {name: name for name in EXPERIMENTS if name in known} | own | alone


def _absent(names: set[str]) -> list[str]:
    """Titles of the paper's experiments that are not on the page; a page of other experiments alone lacks none."""
    return [experiment.title for name, experiment in EXPERIMENTS.items() if name not in names] if names & EXPERIMENTS.keys() else []


def sections(results: Sequence[Content]) -> list[Section]:
    return [
        section(
            anchor,
            EXPERIMENTS.get(anchor, Experiment(name or OTHER.title, OTHER.text)),
            [result for result in results if name in (result["experiments"] or ("",))],
        )
        for anchor, name in names(results).items()
    ]


def section(name: str, kind: Experiment, results: Sequence[Content]) -> Section:
    members = settings(results)
    members = [setting for setting in members if setting.methods] or members  # the retrained network alone is a row of the others
    if len(members) > 1 and name in AVERAGED:
        members.append(average(members))
    blocks = [block(f"{name}-{index}", name, kind, setting) for index, setting in enumerate(members) if setting.rows]
    return Section(name, kind.title, kind.text, blocks)


def block(anchor: str, experiment: str, kind: Experiment, setting: Setting) -> Block:
    """The parts that have data, and the names of those that have none."""
    paper = partial(printed, experiment)
    makers = {
        "accuracies": lambda: measured.accuracies(setting, paper, kind.digits),
        "end": lambda: measured.at_the_end(setting, paper, kind.digits),
        "tradeoff": lambda: tradeoff(setting, f"{anchor}-tradeoff"),
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
        "afterwards": lambda: evidence.afterwards(setting),
        "known": lambda: evidence.known(setting),
        "against cost": lambda: evidence.against_cost(setting, f"{anchor}-cost"),
        "relearned": lambda: evidence.relearning_curves(setting, f"{anchor}-relearned", evidence.UNSEEN),
        "relearn losses": lambda: evidence.relearning_curves(setting, f"{anchor}-losses", evidence.LOSSES),
    }
    wanted: Iterable[str] = kind.parts or PARTS
    if setting.rows[0].averaged:
        wanted = [part for part in wanted if part in ("accuracies", "end", "nearness", "stability")]
    elif not setting.methods:  # run for comparison only: there is no method to show
        wanted = ["accuracies"]
    made = {part: makers[part]() for part in wanted}
    missing = [(PARTS | AFTERWARDS)[part] for part, it in made.items() if it is None and part not in MEASURED_IF_ASKED]
    return Block(setting.title, [part for part in made.values() if part is not None], missing)
