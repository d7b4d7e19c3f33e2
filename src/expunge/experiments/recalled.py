"""Show stored results of a method of one's own whose class cannot be imported any more: its cells are read, not planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from expunge.errors import InputError
from expunge.experiments.cells import REFERENCE, Cell, digest_of
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import Entry
from expunge.experiments.plans import Experiment, entries
from expunge.experiments.profiles import Profile
from expunge.experiments.results import Result, load, path_of
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
    for name in dict.fromkeys(map(canonical, listed)):
        try:
            if is_path(name):
                method_class(name)
            importable.append(name)
        except InputError as error:
            results = [result for result in load(folder) if result.cell.method["name"] == name]
            if not results:
                raise
            say(f"{error}; shown is what has been run before")
            stored += _latest(results, folder)
    names = importable if importable or not stored else [REFERENCE]
    return {
        experiment: _with_stored(entries(experiment, profile, only, names), experiment, profile, only, stored) for experiment in experiments
    }


def _latest(results: Iterable[Result], folder: str | os.PathLike[str]) -> list[Result]:
    """One result per place and reading: where the class was changed between runs, that of the last revision, and of these the last run."""

    def age(result: Result) -> tuple[int, int, str, float]:
        revision = result.cell.method.get("revision")
        written = path_of(folder, result.digest).stat().st_mtime
        if isinstance(revision, int):
            return (1, revision, "", written)
        return (0, 0, "", written) if revision is None else (2, 0, str(revision), written)

    return list({(_place(result.cell), result.cell.method["reading"]): result for result in sorted(results, key=age)}.values())


def _with_stored(
    planned: list[Entry], experiment: Experiment, profile: Profile, only: Sequence[str], stored: Sequence[Result]
) -> list[Entry]:
    """A stored cell goes where the experiment has one of a known method that differs by the method alone."""
    if not stored:
        return planned
    known = list(experiment.entries(profile))
    sections = list(dict.fromkeys((entry.block, entry.section) for entry in known))
    places = {_place(entry.cell): entry for entry in known if entry.row != ORIGINAL}
    recalled = [
        Entry(result.cell, place.block, place.section, str(result.cell.method["name"]))
        for result in stored
        if experiment.name in result.experiments and (place := places.get(_place(result.cell))) is not None
    ]
    recalled = [entry for entry in recalled if all(word in entry.cell.label.split() for word in only)]
    return sorted([*planned, *recalled], key=lambda entry: sections.index((entry.block, entry.section)))


def _place(cell: Cell) -> str:
    return digest_of({**asdict(cell), "method": cell.method.get("ratio"), "tuning": None})
