"""Show the results of `demo` and `compare` as tables and notes, and write a page and result.json."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.experiments.cells import CHOSEN
from expunge.experiments.comparison import Plan
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import CONTROL, Entry
from expunge.experiments.results import DIVERGED, Result
from expunge.experiments.runner import Place
from expunge.report.formats import FORMATS
from expunge.report.formats import show as show_tables
from expunge.report.page import page
from expunge.report.paper_tables import NOT_RUN, REFUSED, Row, tables
from expunge.storage.codec import encode
from expunge.storage.documents import read_json
from expunge.storage.files import write_bytes, write_json
from expunge.storage.folders import RESULT, check_owned, listed, signature

PAGE = "page.html"
NETWORK = ".safetensors"
TEXT = ("fisher-mask", "text")
FORGOTTEN = 0.01  # a forget accuracy up to this counts as forgotten
WIDTH = 80  # columns of a terminal
EXPLAINED = {
    "summary": "masked: by the method's edit alone. after: at the epoch that is best on validation data (0: no training helped; Retrain: "
    "the last).",
    "evidence": "score Δ: fluctuation over the epochs. re-learn: epochs on all data until the forget loss is near the original's again. "
    "same, KL: classes shared with the retrained network, divergence from it.",
}

Results = Mapping[str, Result]


def stored(plan: Plan, place: Place) -> dict[str, Result]:
    """The stored results of a plan, by digest."""
    results = {entry.cell.digest: place.result(entry.cell) for entry in plan.entries}
    return {digest: result for digest, result in results.items() if result is not None}


def show(plan: Plan, results: Results) -> None:
    """Print tables, and notes below them."""
    first, *others = [
        replace(table, rows=tuple(map(_with_one_reason, table.rows))) for table in tables(plan.experiment, plan.entries, results)
    ]
    drawn = [first, *(replace(table, notes=()) for table in others)]  # the notes on refused methods are the same in all
    if sys.stdout.isatty():
        show_tables(drawn)
    else:
        print(FORMATS["text"](drawn))
    print("\n".join(textwrap.fill(note, WIDTH) for note in notes(plan, results)))


def _with_one_reason(row: Row) -> Row:
    """A row without a number says why once, not in every column."""
    first, *others = row.values
    if any(value.mean is not None for value in row.values) or first.text not in (REFUSED, NOT_RUN, DIVERGED):
        return row
    return replace(row, values=(first, *(replace(value, text="") for value in others)))


def notes(plan: Plan, results: Results) -> list[str]:
    """What the columns are, what to expect of the reference, and what was chosen."""
    lines = [EXPLAINED[view] for view in plan.experiment.views] + [f"Retrain: {plan.scenario.reference}"]
    for entry in plan.entries:
        result = results.get(entry.cell.digest)
        if result is None or result.best is None:
            continue
        method = (entry.cell.method["name"], entry.cell.method["reading"])
        if method[1] == CHOSEN:
            lines.append(f"FisherMask, chosen: {_choice(result)} by validation data; its seconds include the choice.")
        elif method[0] == CONTROL:
            lines.append("MaskClassifier is a control: all that the network knew is still in it.")
        elif method == TEXT and entry.cell.scenario["kind"] == "category" and result.best.forget > FORGOTTEN:
            left = f"{100 * result.best.forget:.1f} % forget accuracy is left"
            lines.append(f"FisherMask as the paper's text has it fails here: {left}.")
    return lines


def _choice(result: Result) -> str:
    ratio = re.search(r"ratio=([\d.]+)", result.setting or "")
    weight = re.search(r"remain_weight=([\d.]+|None)", result.setting or "")
    shown = "n_remain/n_forget" if weight is None or weight[1] == "None" else f"{float(weight[1]):g}"
    return f"λ = {shown} and R = {'?' if ratio is None else ratio[1]}"


def check_folder_of(plan: Plan, out: str | os.PathLike[str], models: bool) -> None:
    """Raise rather than replace files that this command has not written."""
    command = plan.experiment.name
    check_owned("out", out, command, [PAGE, *(_network(entry) for entry in plan.entries if models)])
    if (stranger := next((path for path in (Path(out) / "cells").glob("*.json") if not _is_of(path, command)), None)) is not None:
        rule = f"must be a folder without results of other commands than `expunge {command}`: choose another"
        raise InputError("out", rule, os.fspath(stranger))


def _is_of(path: Path, command: str) -> bool:
    """Whether a command asked for a cell's result; what cannot be read raises where it is needed."""
    try:
        return command in read_json(path)["experiments"]
    except (OSError, ValueError, KeyError, TypeError):
        return True


def save(place: Place, plan: Plan, results: Results, settings: dict[str, Any], models: bool = False, finished: bool = True) -> None:
    """Write the page, with `models` one safetensors file per method, and last result.json, which names them; remove an earlier run's."""
    folder, command = place.folder, plan.experiment.name
    earlier = listed(folder, command)
    present = [entry for entry in plan.entries if entry.cell.digest in results]
    networks = {_network(entry): place.network(entry.cell) for entry in present if models and place.network(entry.cell).exists()}
    # These files are ours, also where the next lines are cut short: what an earlier run wrote stays beside their names.
    before = read_json(folder / RESULT) if earlier else {}
    write_json(folder / RESULT, {**before, **signature(command, [PAGE, *networks, *earlier])})
    for name, path in networks.items():
        write_bytes(folder / name, path.read_bytes())
    shown = [results[entry.cell.digest] for entry in present if entry.row != ORIGINAL]  # every table of the page has it as "before"
    write_bytes(folder / PAGE, page(shown, f"expunge {command}").encode(errors="replace"))
    result = {
        **signature(command, [PAGE, *networks]),
        "settings": settings,
        "finished": finished,
        "scenario": {"name": plan.scenario.name, "reference": plan.scenario.reference, "forget": len(plan.scenario.forget)},
        "results": [encode(results[entry.cell.digest]) for entry in present],
    }
    result["scenario"]["remain"] = 0 if plan.scenario.remain is None else len(plan.scenario.remain)
    write_json(folder / RESULT, result)
    for name in earlier - {*networks}:
        if name.endswith(NETWORK) and (folder / name).is_file():  # result.json may list anything
            (folder / name).unlink()


def _network(entry: Entry) -> str:
    """A method's path has slashes."""
    name, reading = entry.cell.method["name"], entry.cell.method["reading"]
    return re.sub(r"[^\w.-]+", "-", name + ("" if reading == "text" else f"-{reading}")) + NETWORK
