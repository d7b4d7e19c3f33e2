"""Compare several methods on your model: the same data and options for all, one table, one folder."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from expunge.data.batches import Data
from expunge.data.objective import Objective, check_objective
from expunge.errors import ExpungeError, InputError
from expunge.methods import SCRUB, SSD, BadTeacher, Choose, FisherMask, Method, RandomLabels
from expunge.methods.labelling import labelled_methods
from expunge.metrics import accuracy, unlearn_score
from expunge.model.checks import check_module
from expunge.outcome import Outcome
from expunge.runtime.callers import warnings_about
from expunge.runtime.display import counted, html_table, shortened, text_table
from expunge.runtime.progress import announce, is_shown
from expunge.storage.files import write_json
from expunge.storage.folders import RESULT, reserved, signature
from expunge.unlearning import unlearn
from expunge.validate import shown

COMMAND = "comparison"  # in result.json: what made the folder
WIDTH = 80  # columns of a table as text
FAILED = "–"

Methods = Mapping[str, Method | str] | Iterable[Method | str]
Accuracies = Mapping[str, float]

# Methods that need no schedule tuned to the model: one that finds its own, no training at all, or the small rates of their papers.
DEFAULT: Mapping[str, Method | str] = {
    "Choose": Choose(),
    "FisherMask": FisherMask(tuning=None),
    "FisherMask, as released": FisherMask.as_released(tuning=None),
    "SSD": SSD(),
    "RandomLabels": RandomLabels(),
    "BadTeacher": BadTeacher(),
    "SCRUB": SCRUB(),
}


@dataclass(frozen=True)
class Comparison:
    """The result of every method, by its label: an `Outcome`, or the error of a method that cannot work here.

    `comparison["SSD"]` is the outcome of a method; iterating gives the labels. `before` and `retrained` are the accuracies of the original
    model and of the reference.
    """

    results: Mapping[str, Outcome | ExpungeError]
    before: Accuracies
    retrained: Accuracies | None = None

    def __getitem__(self, label: str) -> Outcome:
        result = self.results.get(label)
        if isinstance(result, Outcome):
            return result
        rule = f"must be one of {', '.join(self.results)}" if result is None else f"{label} has no outcome: {result}"
        raise InputError("label", rule, shown(label) if result is None else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `result.json`, and every outcome into a folder in it, whole or not at all; an earlier comparison there is replaced.

        `expunge.load_outcome(folder / "1-FisherMask", model)` reads one of them.
        """
        folders = {label: _folder(number, label) for number, (label, _) in enumerate(self._outcomes(), start=1)}
        result = signature(COMMAND, [f"{name}/" for name in folders.values()]) | {
            "before": _plain(self.before),
            "retrained": None if self.retrained is None else _plain(self.retrained),
            "watched": [str(name) for name in self.before],
            "methods": [
                {"label": label, "folder": folders.get(label), "error": None if label in folders else str(result)}
                for label, result in self.results.items()
            ],
        }

        def write(new: Path) -> None:
            for label, outcome in self._outcomes():
                outcome.save(new / folders[label])
            write_json(new / RESULT, result)

        with reserved("folder", folder, COMMAND) as place:
            return place.save(write)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(f'{shortened(label)}{self._mark(label)}' for label in self.results)})"

    def __str__(self) -> str:
        """The table, with as many of the watched data as fit."""
        for columns in range(len(self.before), -1, -1):
            table = text_table(self._title(), self._rows(columns, name=24, head=18))
            if columns == 0 or max(map(len, table.splitlines())) <= WIDTH:
                break
        left = len(self.before) - columns
        notes = [f"and {left} more watched"] if left else []
        notes += [textwrap.fill(f"{FAILED} {reason}", WIDTH, subsequent_indent="  ") for reason in self._reasons()]
        return "\n".join([table, *notes])

    def _repr_html_(self) -> str:
        title = "; ".join([self._title(), *self._reasons()])
        return html_table(title, self._rows(len(self.before)))

    def _title(self) -> str:
        return f"{counted(len(self.results), 'method')} compared; accuracy at the end, unlearn score, seconds of work"

    def _rows(self, columns: int, name: int = 40, head: int = 40) -> list[Sequence[str]]:
        watched = [*self.before][:columns]
        scored = {"remain", "forget"} <= self.before.keys()

        def row(label: str, accuracies: Accuracies, seconds: str) -> Sequence[str]:
            numbers = [f"{100 * accuracies[data]:.1f} %" if data in accuracies else FAILED for data in watched]
            return [shortened(label, name), *numbers, *([_score(accuracies)] if scored else []), seconds]

        titles = ["", *(shortened(str(data), head) for data in watched), *(["score"] if scored else []), "seconds"]
        rows = [titles, row("before", self.before, "")]
        for label, result in self.results.items():
            if isinstance(result, Outcome):
                rows.append(
                    row(
                        label,
                        result.history[-1].accuracies if result.history else {},
                        f"{result.seconds:,.{2 if result.seconds < 100 else 0}f}",
                    )
                )
            else:
                rows.append(row(label, {}, FAILED))
        return rows if self.retrained is None else [*rows, row("retrained", self.retrained, "")]

    def _reasons(self) -> list[str]:
        return [f"{shortened(label)}: {result}" for label, result in self.results.items() if isinstance(result, ExpungeError)]

    def _outcomes(self) -> list[tuple[str, Outcome]]:
        return [(label, result) for label, result in self.results.items() if isinstance(result, Outcome)]

    def _mark(self, label: str) -> str:
        return "" if isinstance(self.results[label], Outcome) else " failed"


def compare(
    model: nn.Module,
    forget: Data,
    remain: Data | None = None,
    methods: Methods = DEFAULT,
    *,
    retrained: nn.Module | None = None,
    validation: Data | None = None,
    objective: Objective = Objective(),
    head: Sequence[str] | str | None = None,
    watch: Mapping[str, Data] | None = None,
    batch_size: int = 128,
    progress: bool | None = None,
) -> Comparison:
    """Run several methods on copies of the model, all with the same data and options of `unlearn`.

    `methods` are methods with their settings, names as in METHODS (with the defaults), or a mapping of labels to these. A method that
    cannot work here becomes a row with its reason, and the others go on; an error that all of them have in common is raised. `retrained` is
    a network trained without the forget data, measured beside them; `validation` is for methods that choose (`Choose`).
    """
    labelled = labelled_methods(methods)
    progress = is_shown(progress)
    check_module(model)
    check_objective(objective)
    if watch is not None and not isinstance(watch, Mapping):
        raise InputError("watch", 'must map names to data, such as {"test": test_set}', type(watch).__name__)
    forget, remain, validation = _rereadable(forget), _rereadable(remain), _rereadable(validation)
    if watch is None and objective.classes is False:  # nothing has an accuracy
        watch = {}
    watch = None if watch is None else {name: _rereadable(data) for name, data in watch.items()}
    watched = {"remain": remain, "forget": forget} if watch is None else watch
    parts = {name: data for name, data in watched.items() if data is not None}
    reference = None
    if retrained is not None:
        check_module(retrained, "retrained")
        try:
            reference = _accuracies(retrained, parts, objective, batch_size)
        except InputError as error:
            raise InputError("retrained", f"must be a network like the model; {error.argument}: {error.rule}", error.found) from error
    results: dict[str, Outcome | ExpungeError] = {}
    for number, (label, method) in enumerate(labelled.items(), start=1):
        announce(f"{shortened(label)} ({number} of {len(labelled)})", progress)
        try:
            with warnings_about(shortened(label)):
                results[label] = unlearn(
                    model,
                    forget,
                    remain,
                    method,
                    validation=validation if getattr(method, "takes_validation", False) else None,
                    objective=objective,
                    head=head,
                    watch=watch,
                    batch_size=batch_size,
                    progress=progress,
                )
        except ExpungeError as error:
            results[label] = error
        except Exception as error:  # a defect of one method must not cost the outcomes of the others
            results[label] = ExpungeError(f"{type(error).__name__}: {error}")
    _raise_common_error([*results.values()])
    for result in results.values():
        if isinstance(result, ExpungeError):  # the frames it was raised in refer to a copy of the model
            result.__traceback__ = result.__cause__ = result.__context__ = None
    outcomes = [result for result in results.values() if isinstance(result, Outcome)]
    before = outcomes[0].history[0].accuracies if outcomes else _accuracies(model, parts, objective, batch_size)
    return Comparison(results, before, reference)


def _accuracies(network: nn.Module, parts: Mapping[str, Data], objective: Objective, batch_size: int) -> Accuracies:
    accuracies = {}
    for name, data in parts.items():
        try:
            accuracies[name] = accuracy(network, data, objective, batch_size)
        except InputError as error:
            if error.argument == "batch_size":
                raise
            raise InputError(shortened(str(name)), f"{error.rule} (watch={{}} measures no accuracy)", error.found) from error
    return accuracies


def _rereadable(data: Any) -> Any:
    """Data that every method can read: an iterator's batches are kept in memory."""
    return list(data) if isinstance(data, Iterator) else data


def _raise_common_error(results: Sequence[Outcome | ExpungeError]) -> None:
    """Raise an error that all methods have in common: it is a mistake in their common arguments."""
    first = results[0]
    if isinstance(first, ExpungeError) and len({str(result) if isinstance(result, ExpungeError) else "" for result in results}) == 1:
        raise first


def _score(accuracies: Accuracies) -> str:
    if not {"remain", "forget"} <= accuracies.keys():
        return FAILED
    return f"{unlearn_score(accuracies['remain'], accuracies['forget']):.3f}"


def _folder(number: int, label: str) -> str:
    """A name for any file system: two labels may differ by their case alone."""
    return f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', label)[:40].strip('-')}".rstrip("-")


def _plain(accuracies: Accuracies) -> dict[str, float]:
    return {str(name): value for name, value in accuracies.items()}
