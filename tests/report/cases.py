"""Results of whole experiments, made up, for tables beside the paper's numbers."""

from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.profiles import PAPER
from expunge.experiments.results import Accuracies, Best, Epoch, Evidence, Relearn, Result, Stability
from expunge.report.paper_tables import tables

BEFORE = Accuracies(0.85, 0.88, 0.85 / 1.88)


def evidence(cell):
    """What a cell asks for: of a class everything, of samples the loss attack."""
    if cell.evidence is None or cell.scenario["kind"] != "category":
        return None if cell.evidence is None else Evidence(0.51)
    back = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
    return Evidence(0.45, {"stage1": 0.9, "stage2": 0.95}, (4.5, 2.0, 1.0, 0.5, 0.2, 0.1), back, back)


def result(cell, remain=0.9, forget=0.1, error=None, epochs=5, relearn=None):
    history = tuple(Epoch(epoch, remain - 0.01 * (epochs - epoch), forget, 0.8, 1.0) for epoch in range(epochs + 1))
    best = None if error else Best("test", epochs, remain, forget, remain / (1 + forget))
    masked = None if cell.method["name"] in ("finetune", "retrain") else Accuracies(0.8, 0.2, 0.7)
    return Result(
        cell,
        cell.digest,
        seconds=1.0,
        versions={},
        hardware={"device": "cpu"},
        error=error,
        work_seconds=1.0,
        before=BEFORE,
        retrained=BEFORE,
        masked=masked,
        history=() if error else history,
        best=best,
        last=history[-1],
        stability=Stability(0.01, 0.02, 0.03),
        relearn=relearn,
        evidence=None if error else evidence(cell),
        agreement_by={"remain": 0.9, "forget": 0.7},
    )


def made(name, profile=PAPER, methods=("finetune", "fisher-mask"), **settings):
    """Results of an experiment; FisherMask's remain accuracy rises with the seed."""
    members = entries(EXPERIMENTS[name], profile, listed=methods)
    seeds = list(profile.seeds)
    found = {}
    for entry in members:
        better = 0.01 * (seeds.index(entry.cell.seed) + 1) if entry.cell.method["name"] == "fisher-mask" else 0.0
        found[entry.cell.digest] = result(entry.cell, 0.8 + better, 0.0 if better else 0.5, **settings)
    return members, found


def paper_tables():
    """Tables with every kind of column, of the paper's methods."""
    relearn = Relearn(3, 40, 0.1, (1.0, 0.1))
    return [table for name in EXPERIMENTS for table in tables(EXPERIMENTS[name], *made(name, PAPER, ("paper",), relearn=relearn))]
