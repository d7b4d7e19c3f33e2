"""The paper's printed number for a row of ours, where there is one."""

from __future__ import annotations

from expunge.bench import paper
from expunge.report.rows import Row, Told

MODELS = 16  # the paper's averages are over four datasets and four networks


def printed(experiment: str, row: Row, view: str, measure: str) -> float | None:
    """In percent. `view`: "masked", "best" or "stability"; an average is compared only where ours is over as many models."""
    cell = row.cell
    name = str((cell.get("method") or {}).get("name"))
    block = f"{cell.get('dataset')}/{cell.get('network')}"
    if row.averaged:
        models = {(result["cell"].get("dataset"), result["cell"].get("network")) for result in row.results}
        block = paper.AVERAGE if len(models) == MODELS else ""
    found = paper.printed(experiment, view, block, section(experiment, cell), name).get(measure)
    return None if found is None else found.value


def section(experiment: str, cell: Told) -> str:
    """The part of the paper's table a cell belongs to."""
    scenario, method = cell.get("scenario") or {}, cell.get("method") or {}
    if experiment == "table3" and "ratio" in method:
        return f"ratio {method['ratio']:.2f}"
    if experiment == "table4" and "fraction" in scenario:
        return f"{100 * scenario['fraction']:g} %"
    if experiment == "table5":
        at_hand = [scenario[limit] for limit in ("remain_fraction", "remain_count") if limit in scenario]
        return "no remain data" if at_hand == [0] else "0.1 % remain data" if at_hand else ""
    return ""
