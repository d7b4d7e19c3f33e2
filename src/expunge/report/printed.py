"""Look up the paper's printed number for a row of ours, and whether the two may be compared."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from expunge.experiments import paper
from expunge.report.page_tables import Printed
from expunge.report.paper_tables import MODELS, is_comparable, paper_numbers
from expunge.report.rows import Content, Row, at, shown
from expunge.vision.recipes import RECIPES

READINGS = ("text", "released")  # of the paper, and of its program
TUNING_EPOCHS = 5
SCENARIO = {"label": 0, "n": 200, "trigger": 4}  # the paper's, where a scenario says it


def printed(experiment: str, row: Row, view: str, measure: str) -> Printed | None:
    """In percent. `view`: "masked", "best", "stability", or "before" for the network a method starts from."""
    cell = row.cell
    block = paper.AVERAGE if row.averaged else f"{cell['dataset']}/{cell['network']}"
    numbers = partial(paper_numbers, experiment, block=block)
    if view == "before":  # in table 1 the row of Finetune before it is trained
        there = numbers("best", section="", name=paper.ORIGINAL) or numbers("masked", section="", name="finetune")
    else:
        there = numbers(view, section=section(experiment, cell), name=row.method)
    return Printed(there[measure], reason(experiment, row, view, measure)) if measure in there else None


def section(experiment: str, cell: Content) -> str:
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


def reason(experiment: str, row: Row, view: str, measure: str) -> str:
    """Why ours and the paper's number are not comparable; "" where they are."""
    cell = row.cell
    models = len({(result["cell"]["dataset"], result["cell"]["network"]) for result in row.results})
    if row.averaged and not is_comparable(experiment, paper.AVERAGE, models):
        return f"the paper's average is over {MODELS} models, ours over {models}"
    if difference := _changed_settings(cell, trained=view == "before" or row.retrained):
        return difference
    if view == "before":
        return ""
    if experiment == "table2" and not row.averaged:
        return "the paper prints its average over 16 models, and no number for this one"
    if view == "best" and row.retrained:
        return "the retrained network is ours at its last epoch, in the paper at the epoch best on test data"
    if experiment == "table4":
        return "the paper's networks were taken at the epoch best on test data, ours at the last, when they know the wrong labels by heart"
    if view == "best" and any(at(result, "best", "on") == "validation" for result in row.results):
        return "our epochs were chosen on validation data, the paper's on test data"
    if row.reading not in READINGS:
        return f"{row.reading}: a formula of neither the paper's text nor its program"
    if experiment == "table5" and row.method == "tf-idf-mask":
        return "TfIdfMask: the paper's program reads activations of all training data, ours of the remain data at hand"
    if measure == "epochs":
        return "the paper prints no epoch above 4 of 5, so we take it to count from 0; ours count from 1"
    return ""


def _changed_settings(cell: Content, trained: bool) -> str:
    """What differs from the paper in data, training or fine-tuning; `trained`: of a network that is not fine-tuned."""
    recipe, tuning = cell.get("recipe") or {}, cell.get("tuning") or {}
    theirs = asdict(RECIPES[cell["dataset"]]) if cell["dataset"] in RECIPES else {}
    for key, value in theirs.items():
        if key in recipe and shown(recipe[key]) != shown(value):
            return f"our networks were trained with {key.replace('_', ' ')} {shown(recipe[key])}, the paper's with {shown(value)}"
    if cell.get("validation"):
        return f"{100 * cell['validation']:g} % of our training data were held out for validation"
    for key, value in SCENARIO.items():
        if cell["scenario"].get(key, value) != value:
            return f"our {key} is {cell['scenario'][key]}, the paper's {value}"
    if not trained and tuning.get("epochs", TUNING_EPOCHS) != TUNING_EPOCHS:
        return f"ours was fine-tuned for {tuning['epochs']} epochs, the paper's for {TUNING_EPOCHS}"
    return ""
