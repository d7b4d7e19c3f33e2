"""Show stored results of a method of one's own whose class cannot be imported any more: its cells are read, not planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from expunge.errors import InputError
from expunge.experiments.cells import Cell, digest_of
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.plans import REFERENCE, Entry, Experiment, entries
from expunge.experiments.profiles import Profile
from expunge.experiments.results import Result, load
from expunge.methods.lookup import canonical, is_path, method_class


def planned_or_stored(
    experiments: Iterable[Experiment],
    profile: Profile,
    only: Sequence[str],
    listed: Sequence[str],
    folder: str | os.PathLike[str],
    say: Callable[[str], None],
) -> dict[Experiment, list[Entry]]:
    """As `entries`; what is `listed` and cannot be imported has the cells of its results in the folder, where there are some."""
    stored: list[Result] = []
    importable: list[str] = []
    for name in listed:
        try:
            if is_path(name):
                method_class(canonical(name))
            importable.append(name)
        except InputError as error:
            results = [result for result in load(folder) if result.cell.method["name"] == canonical(name)]
            if not results:
                raise
            say(f"{error}; shown is what has been run before")
            stored += results
    names = importable if importable or not stored else [REFERENCE]
    return {each: _with_stored(entries(each, profile, only, names), each, profile, only, stored) for each in experiments}


def _with_stored(
    planned: list[Entry], experiment: Experiment, profile: Profile, only: Sequence[str], stored: Sequence[Result]
) -> list[Entry]:
    """A stored cell goes where the experiment has one of a known method that differs by the method alone."""
    if not stored:
        return planned
    known = list(experiment.entries(profile))
    sections = list(dict.fromkeys((entry.block, entry.section) for entry in known))
    places = {_place(entry.cell): entry for entry in known if entry.row != ORIGINAL}
    found = [
        Entry(result.cell, place.block, place.section, str(result.cell.method["name"]))
        for result in stored
        if experiment.name in result.experiments and (place := places.get(_place(result.cell))) is not None
    ]
    found = [entry for entry in found if all(word in entry.cell.label.split() for word in only)]
    return sorted([*planned, *found], key=lambda entry: sections.index((entry.block, entry.section)))


def _place(cell: Cell) -> str:
    return digest_of({**asdict(cell), "method": cell.method.get("ratio"), "tuning": None})
