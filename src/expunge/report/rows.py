"""Group results: the settings they come from, in each a row per method over its seeds, and the networks to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Literal

from expunge.experiments.cells import REFERENCE
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import PAPER_METHODS
from expunge.methods import METHODS
from expunge.methods.lookup import class_name
from expunge.report.marks import mark
from expunge.report.svg import Mark

Content = Mapping[str, Any]
Network = Literal["before", "retrained"]

# A cell's parts that make the setting; all but the seed among the others make the method's row.
PLACE = ("dataset", "network", "scenario")
NETWORKS: dict[Network, str] = {"before": "before", "retrained": class_name(REFERENCE)}  # and their labels
TRAINED_BY = ("recipe", "validation", "precision")  # a cell's parts that decide both
SCENARIOS: dict[str, Callable[[Any], str]] = {  # what a scenario says, in words; anything else by its name
    "label": lambda label: f"class {shown(label)}",
    "n": lambda count: f"{shown(count)} samples",
    "fraction": lambda share: f"{100 * share:g} % of the samples",
    "remain_count": lambda count: f"{count or 'no'} remain samples",
    "remain_fraction": lambda share: f"{100 * share:g} % remain data",
}
WORDS: dict[str, Callable[[str], str]] = {  # what a setting of a method or its tuning says, in words; anything else by its name
    "method.reset.ratio": lambda share: f"{_percent(share)} by Fisher",
}
GROUPS = {"tuning.distillation": "distilled"}  # settings that a row has together or not at all
ASKED = "evidence."  # of a cell: what is measured, and nothing about the method


@dataclass(frozen=True, eq=False)  # by identity: results are dictionaries
class Row:
    """One method, as it was set, on one setting or several: one result per seed. Or one of the networks to compare with: `network`."""

    label: str
    results: tuple[Content, ...]
    averaged: bool = False
    network: Network | None = None

    def values(self, *path: str) -> list[float]:
        """The number at a path of each result that has one: `values("best", "remain")`."""
        numbers = (at(result, *path) for result in self.results)
        return [float(value) for value in numbers if isinstance(value, int | float) and isfinite(value)]

    def lists(self, *path: str) -> list[Sequence[float | None]]:
        """As `values`, for lists of one length."""
        lists = [value for value in (at(result, *path) for result in self.results) if isinstance(value, list | tuple) and value]
        return [values for values in lists if len(values) == len(lists[0])]

    @property
    def cell(self) -> Content:
        return self.results[0]["cell"]

    @property
    def method(self) -> str:
        """By its name in cells; of the network before that of any method."""
        return REFERENCE if self.network == "retrained" else str(self.cell["method"]["name"])

    @property
    def reading(self) -> str:
        return str(self.cell["method"].get("reading", "text"))

    @property
    def retrained(self) -> bool:
        return self.network != "before" and self.method == REFERENCE

    @property
    def original(self) -> bool:
        """Whether it is the network before, measured in cells of its own."""
        return self.network is None and self.method == ORIGINAL

    @property
    def mark(self) -> Mark:
        return mark(self.method, "text" if self.network else self.reading)

    @property
    def family(self) -> str:
        return family(flat(self.cell))


@dataclass(frozen=True)
class Setting:
    """A dataset, a network and what is forgotten, or the mean over several of them."""

    title: str
    rows: tuple[Row, ...]

    @property
    def results(self) -> list[Content]:
        return [result for row in self.rows for result in row.results]

    @property
    def methods(self) -> list[Row]:
        """All rows but those of the networks before and retrained, which are references."""
        return [row for row in self.rows if not row.retrained and not row.original]

    @cached_property
    def references(self) -> list[Row]:
        """The network before and the retrained one, which all methods share; two more for every other recipe."""
        averaged = bool(self.rows) and self.rows[0].averaged
        groups: dict[tuple[tuple[str, str], ...], list[Content]] = {}
        for result in self.results:
            trained_by = flat({part: result["cell"].get(part) for part in TRAINED_BY})
            groups.setdefault(() if averaged else tuple(trained_by.items()), []).append(result)
        made = []
        for recipe in sorted(groups, key=lambda recipe: -len(groups[recipe])):
            suffix = difference(dict(recipe), [dict(other) for other in groups])
            for network, label in NETWORKS.items():
                if networks := once(groups[recipe], network):
                    made.append(Row(", ".join([label, *suffix]), tuple(networks), averaged, network))
        return made

    def reference(self, network: Network) -> Row | None:
        """That of most results."""
        return next((row for row in self.references if row.network == network), None)


def once(results: Iterable[Content], network: Network) -> list[Content]:
    """One result for each network of that kind, the reference's own where there is one."""
    networks: dict[str, Content] = {}
    for result in sorted(results, key=lambda result: result["cell"]["method"]["name"] != REFERENCE):
        if at(result, network, "remain") is not None:
            cell = result["cell"]
            networks.setdefault(f"{place(cell)} {cell.get('seed')}", result)
    return list(networks.values())


def at(content: Any, *path: str) -> Any:
    """The value at a path, None where the path ends early."""
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def place(cell: Content) -> str:
    """A setting in words: dataset, network, scenario."""
    scenario = {key: value for key, value in (cell.get("scenario") or {}).items() if value is not None}
    kind = str(scenario.pop("kind", "unknown scenario"))
    parts = [SCENARIOS[key](value) if key in SCENARIOS else f"{key.replace('_', ' ')} {shown(value)}" for key, value in scenario.items()]
    return f"{cell.get('network')} on {cell.get('dataset')}: {', '.join([kind, *parts] if kind != 'category' else parts or [kind])}"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {shown(part)}" for key, part in value.items()) + ")"
    return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)


def settings(results: Iterable[Content]) -> list[Setting]:
    """One setting for each dataset, network and scenario, in the order they come."""
    groups: dict[str, list[Content]] = {}
    for result in results:
        groups.setdefault(place(result["cell"]), []).append(result)
    return [Setting(title, tuple(rows(members))) for title, members in groups.items()]


def average(members: Sequence[Setting]) -> Setting:
    """The rows all of the settings have, with the results of all."""
    labels = [row.label for row in members[0].rows if all(any(other.label == row.label for other in setting.rows) for setting in members)]
    merged = [
        tuple(result for setting in members for row in setting.rows if row.label == label for result in row.results) for label in labels
    ]
    title = f"Mean over {len(members)} models: {', '.join(setting.title.partition(':')[0] for setting in members)}"
    return Setting(title, tuple(Row(*parts, averaged=True) for parts in zip(labels, merged, strict=True)))


def rows(results: Sequence[Content]) -> list[Row]:
    """A row for each method as it was set; its label says what sets it apart from others of its name, and no more.

    The paper's methods come first, those unknown to us last; of one method the text's reading, and what is set apart least. Of two results
    that differ by the evidence alone, as the retrained network of a class has, the one with evidence stays.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Content]] = {}
    for result in results:
        values = {name: value for name, value in flat(result["cell"]).items() if not name.startswith(ASKED)}
        groups.setdefault(tuple(sorted(values.items())), []).append(result)
    made = []
    for key, members in groups.items():
        values = dict(key)
        measured = {str(result["cell"].get("seed")) for result in members if result.get("evidence")}
        members = [result for result in members if result.get("evidence") or str(result["cell"].get("seed")) not in measured]
        kin = [dict(other) for other in groups if family(dict(other)) == family(values)]
        label = ", ".join([family(values), *difference(values, kin)])
        made.append(Row(label, tuple(sorted(members, key=lambda result: str(result["cell"].get("seed"))))))
    order = [*PAPER_METHODS, *METHODS]

    def place_of(row: Row) -> tuple[int, str, str]:
        name = row.cell["method"]["name"]
        return (order.index(name) if name in order else len(order), row.label.partition(",")[0], row.label)

    return sorted(made, key=place_of)


def difference(values: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> list[str]:
    """What distinguishes these values from the others, in words."""
    said = []
    for name in sorted(name for name in values if any(other.get(name) != values[name] for other in others)):
        group = GROUPS.get(name.rpartition(".")[0])
        said += [] if group is None else [group]
        if group is None or any(other.get(name) not in (None, values[name]) for other in others):
            words = WORDS.get(name, lambda value, name=name: f"{name.rpartition('.')[2].replace('_', ' ')} {value}")
            said.append(words(values[name]))
    return list(dict.fromkeys(said))


def _percent(share: str) -> str:
    return f"{100 * float(share):g} %" if share.replace(".", "", 1).isdecimal() else share


def family(values: Mapping[str, str]) -> str:
    """A method's name, and the reading where it is not the text's."""
    name, reading = values.get("method.name", "unnamed"), values.get("method.reading", "text")
    kind = class_name(name)
    return kind if reading == "text" else f"{kind} ({reading})"


def flat(cell: Content) -> dict[str, str]:
    """What a cell sets beside the setting and the seed, as text: {"method.ratio": "0.02"}."""
    values: dict[str, str] = {}
    for key, value in cell.items():
        if isinstance(value, Mapping) and key not in PLACE:
            values |= {f"{key}.{name}": part for name, part in flat(value).items()}
        elif key not in (*PLACE, "seed") and value is not None:
            values[key] = shown(value)
    return values
