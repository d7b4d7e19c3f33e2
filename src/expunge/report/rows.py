"""Results put together: the settings they come from, and in each a row a method over its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from expunge.experiments.plans import PAPER_METHODS
from expunge.methods import METHODS
from expunge.methods.lookup import class_name

Told = Mapping[str, Any]

# A cell's parts that make the setting; all but the seed among the others make the method's row.
PLACE = ("dataset", "network", "scenario")


@dataclass(frozen=True)
class Row:
    """One method, as it was set, on one setting or several: a result a seed."""

    label: str
    results: tuple[Told, ...]
    averaged: bool = False

    def values(self, *path: str) -> list[float]:
        """The number at a path of each result that has one: `values("best", "remain")`."""
        found = (at(result, *path) for result in self.results)
        return [float(value) for value in found if isinstance(value, int | float) and isfinite(value)]

    def lists(self, *path: str) -> list[Sequence[float | None]]:
        """As `values`, of lists that are equally long."""
        found = [value for value in (at(result, *path) for result in self.results) if isinstance(value, list | tuple) and value]
        return [each for each in found if len(each) == len(found[0])]

    @property
    def cell(self) -> Told:
        return self.results[0]["cell"]


@dataclass(frozen=True)
class Setting:
    """A dataset, a network and what is forgotten, or the mean over several of them."""

    title: str
    rows: tuple[Row, ...]

    @property
    def results(self) -> list[Told]:
        return [result for row in self.rows for result in row.results]


def at(told: Any, *path: str) -> Any:
    """What lies at a path, None where it ends early."""
    for key in path:
        told = told.get(key) if isinstance(told, Mapping) else None
    return told


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation over the seeds; None with one."""
    if len(values) < 2:
        return None
    centre = sum(values) / len(values)
    return (sum((value - centre) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def place(cell: Told) -> str:
    """A setting in words: dataset, network, scenario."""
    scenario = dict(cell.get("scenario") or {})
    kind = str(scenario.pop("kind", "unknown scenario"))
    details = [f"{key.replace('_', ' ')} {shown(value)}" for key, value in scenario.items() if value is not None]
    return f"{cell.get('network')} on {cell.get('dataset')}: {', '.join([kind, *details])}"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {shown(each)}" for key, each in value.items()) + ")"
    return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)


def settings(results: Iterable[Told]) -> list[Setting]:
    """One setting for each dataset, network and scenario, in the order they come."""
    groups: dict[str, list[Told]] = {}
    for result in results:
        groups.setdefault(place(result["cell"]), []).append(result)
    return [Setting(title, tuple(rows(found))) for title, found in groups.items()]


def average(found: Sequence[Setting]) -> Setting:
    """The rows all of the settings have, with the results of all."""
    labels = [row.label for row in found[0].rows if all(any(other.label == row.label for other in each.rows) for each in found)]
    merged = [tuple(result for each in found for row in each.rows if row.label == label for result in row.results) for label in labels]
    return Setting(f"Mean over {len(found)} settings", tuple(Row(*each, averaged=True) for each in zip(labels, merged, strict=True)))


def rows(results: Sequence[Told]) -> list[Row]:
    """A row for each method as it was set; its label tells what sets it apart from others of its name, and no more.

    The paper's methods come first, those unknown to us last; of one method the text's reading, and what is set apart least.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Told]] = {}
    for result in results:
        groups.setdefault(tuple(sorted(flat(result["cell"]).items())), []).append(result)
    made = []
    for key, found in groups.items():
        told = dict(key)
        kin = [dict(other) for other in groups if family(dict(other)) == family(told)]
        differs = sorted(name for name in told if any(other.get(name) != told[name] for other in kin))
        label = ", ".join([family(told), *(f"{name.rpartition('.')[2].replace('_', ' ')} {told[name]}" for name in differs)])
        made.append(Row(label, tuple(sorted(found, key=lambda each: str(each["cell"].get("seed"))))))
    order = [*PAPER_METHODS, *METHODS]

    def place_of(row: Row) -> tuple[int, str, str]:
        name = row.cell["method"]["name"]
        return (order.index(name) if name in order else len(order), row.label.partition(",")[0], row.label)

    return sorted(made, key=place_of)


def family(told: Mapping[str, str]) -> str:
    """A method's name, and the reading where it is not the text's."""
    name, reading = told.get("method.name", "unnamed"), told.get("method.reading", "text")
    kind = class_name(name)
    return kind if reading == "text" else f"{kind} ({reading})"


def flat(cell: Told) -> dict[str, str]:
    """What a cell sets beside the setting and the seed, as text: {"method.ratio": "0.02"}."""
    told: dict[str, str] = {}
    for key, value in cell.items():
        if isinstance(value, Mapping) and key not in PLACE:
            told |= {f"{key}.{name}": each for name, each in flat(value).items()}
        elif key not in (*PLACE, "seed") and value is not None:
            told[key] = shown(value)
    return told
