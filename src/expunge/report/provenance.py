"""Report how results were run: a summary, settings, versions, hardware, seconds, every run, and those without a result."""

from __future__ import annotations

from collections.abc import Sequence

from expunge.methods.lookup import is_path
from expunge.report.measured import chosen_on
from expunge.report.page_tables import Cell, Column, Table, number
from expunge.report.rows import Content, at, family, flat, place, shown

LONG = 40  # a table with more rows than this is folded away


def facts(done: Sequence[Content], failed: Sequence[Content]) -> list[tuple[str, str]]:
    """The page in a few words."""
    cells = [result["cell"] for result in done]
    seconds = sum(float(result.get("seconds") or 0) for result in [*done, *failed])
    words = {
        "Runs": f"{len(done)} finished" + (f", {len(failed)} without a result" if failed else ""),
        "Data": ", ".join(sorted({str(cell.get("dataset")) for cell in cells})),
        "Networks": ", ".join(sorted({str(cell.get("network")) for cell in cells})),
        "Methods": ", ".join(sorted({family(flat(cell)) for cell in cells})),
        "Seeds": ", ".join(map(str, sorted({cell.get("seed") for cell in cells}, key=str))),
        "Epoch chosen on": f"{chosen} data" if (chosen := chosen_on(done)) else "",
        "Time": f"{seconds:.0f} seconds" if seconds < 600 else f"{seconds / 3600:.1f} hours",
    }
    return [(key, value) for key, value in words.items() if value]


def failures(failed: Sequence[Content]) -> Table | None:
    """The runs without a result, and why."""
    if not failed:
        return None
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for result in failed:
        cell = result["cell"]
        seeds.setdefault((place(cell), family(flat(cell)), str(result["error"])), []).append(str(cell.get("seed")))
    rows = [[Cell(setting), Cell(method), Cell(", ".join(names)), Cell(why)] for (setting, method, why), names in seeds.items()]
    columns = [Column("setting"), Column("method"), Column("seeds"), Column("why")]
    return Table("Runs without a result", columns, rows, note="They are in no table and no figure of this page.", kind="text")


def runs(results: Sequence[Content]) -> list[Table]:
    """How it was run: settings of the methods, versions, machines, and every run."""
    methods: dict[tuple[str, str], list[Content]] = {}
    for result in results:
        values = flat(result["cell"])
        details = ", ".join(
            f"{key.removeprefix('method.').replace('_', ' ')} {value}" for key, value in values.items() if not _named(key, value)
        )
        methods.setdefault((family(values), details), []).append(result)
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
            number([float(result.get("seconds") or 0)], scale=1),
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
                [
                    Cell(label),
                    Cell(details),
                    Cell(str(len(members)), len(members)),
                    number([float(result.get("seconds") or 0) for result in members], scale=1),
                ]
                for (label, details), members in methods.items()
            ],
            kind="text",
            folded=len(methods) > LONG,
        ),
        Table(
            "Versions and hardware",
            [Column("versions"), Column("hardware"), Column("runs")],
            [[Cell(versions), Cell(hardware), Cell(str(count), count)] for (versions, hardware), count in machines.items()],
            kind="text",
        ),
        Table(
            "Every run",
            [Column("run"), Column("setting"), Column("method"), Column("seed"), Column("seconds"), *weights],
            every,
            kind="text",
            folded=len(every) > LONG,
        ),
    ]


def _named(key: str, value: str) -> bool:
    """Whether the method's label says it; the label of a user's class does not say where it is from."""
    return key == "method.reading" or (key == "method.name" and not is_path(value))


def _pairs(content: Content) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in content.items()) or "unknown"


def _seed(result: Content) -> Cell:
    seed = result["cell"].get("seed")
    return Cell(str(seed), seed if isinstance(seed, int) else None)
