"""The paper's printed number for a row of ours, where there is one."""

from __future__ import annotations

from expunge.experiments import paper
from expunge.report.paper_tables import DATASETS, MODELS
from expunge.report.rows import Row, Told


def printed(experiment: str, row: Row, view: str, measure: str) -> paper.Number | None:
    """In percent. `view`: "masked", "best", "stability", or "before" for the network a method starts from.

    An average stands beside one of ours over as many models, and in table 2, which has nothing else, beside any.
    """
    cell = row.cell
    block, name = f"{cell['dataset']}/{cell['network']}", str(cell["method"]["name"])
    models = {(result["cell"]["dataset"], result["cell"]["network"]) for result in row.results}
    if row.averaged and len(models) < MODELS:
        return None
    if row.averaged or (experiment == "table2" and cell["dataset"] in DATASETS):
        block = paper.AVERAGE
    if view == "before":
        view, name = "best", paper.ORIGINAL
    return paper.printed(experiment, view, block, section(experiment, cell), name).get(measure)


def section(experiment: str, cell: Told) -> str:
    """The part of the paper's table a cell belongs to."""
    scenario, method = cell["scenario"], cell["method"]
    if experiment == "table3" and "ratio" in method:
        return f"ratio {method['ratio']:.2f}"
    if experiment == "table4" and "fraction" in scenario:
        return f"{100 * scenario['fraction']:.0f} %"
    if experiment == "table5" and scenario.get("remain_count") == 0:
        return "no remain data"
    if experiment == "table5" and "remain_fraction" in scenario:
        return f"{100 * scenario['remain_fraction']:g} % remain data"
    return ""
