"""Define views of results: which of their numbers are the columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from expunge.experiments.cells import LIMITS
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import share_of_retraining
from expunge.experiments.results import Result

FINETUNE = "finetune"


@dataclass(frozen=True)
class Column:
    """`value(result, row)`: None where there is none, inf where it is beyond a limit. `better` says what is printed in bold.

    `note` is a line below the table that says what the column is; columns may share one. `settled`: no seed moves it as a rule, so that
    a spread of zero is left out.
    """

    key: str
    title: str
    value: Callable[[Result, str], float | None]
    better: Literal["high", "low"] | None = None
    percent: bool = True
    digits: int = 1
    note: str = ""
    settled: bool = False


@dataclass(frozen=True)
class View:
    """One view of an experiment; `columns` may depend on the results. `by_section`: a table for each section, with columns of its own."""

    title: str
    columns: Callable[[Sequence[Result]], list[Column]]
    shows: Callable[[Result], bool] = lambda result: True  # whether a method has such numbers
    by_section: bool = False
    note: str = ""


def _scores(part: Callable[[Result, str], object], epochs: bool) -> list[Column]:
    def measure(name: str) -> Callable[[Result, str], float | None]:
        return lambda result, row: getattr(part(result, row), name, None)

    scores = [
        Column("remain", "remain", measure("remain"), "high"),
        Column("forget", "forget", measure("forget"), "low"),
        Column("unlearn_score", "unlearn score", measure("unlearn_score"), "high"),
    ]
    # No bold here: to be done at once is no merit of a method that forgets nothing.
    return [*scores, Column("epochs", "epochs", measure("epoch"), percent=False)] if epochs else scores


def _attack(results: Sequence[Result]) -> list[Column]:
    if all(result.attack is None for result in results):
        return []

    def success(result: Result, row: str) -> float | None:
        if row == ORIGINAL:
            return None if result.before is None else result.before.attack
        return result.attack

    return [Column("attack", "attack", success, "low")]


def _by_epoch(measure: str) -> Callable[[Sequence[Result]], list[Column]]:
    """A network that is not trained on stays as it is, so a short history keeps its last value."""

    def at(epoch: int) -> Callable[[Result, str], float | None]:
        return lambda result, row: getattr(result.history[min(epoch, len(result.history) - 1)], measure) if result.history else None

    def columns(results: Sequence[Result]) -> list[Column]:
        longest = max([1, *(len(result.history) for result in results)])  # without any history, one column says so
        return [Column(f"{measure} {epoch}", str(epoch), at(epoch)) for epoch in range(longest)]

    return columns


def _summary(results: Sequence[Result]) -> list[Column]:
    """What a method did, and its cost."""

    def part(name: str, measure: str) -> Callable[[Result, str], float | None]:
        return lambda result, row: getattr(getattr(result, name), measure, None)

    def epoch(result: Result, row: str) -> float | None:
        return None if row == ORIGINAL or result.best is None else result.best.epoch

    return [
        *(Column(f"masked {measure}", f"masked\n{measure}", part("masked", measure)) for measure in ("remain", "forget")),
        *(Column(measure, f"after\n{measure}", part("best", measure)) for measure in ("remain", "forget")),
        Column("unlearn_score", "after\nscore", part("best", "unlearn_score")),
        Column("epoch", "\nepoch", epoch, None, False, 0),
        Column("seconds", "time,\ns", lambda result, row: result.work_seconds, None, False, 2),
    ]


def _evidence(results: Sequence[Result]) -> list[Column]:
    """How far the network is from the retrained one."""

    def by(measure: str, part: str) -> Callable[[Result, str], float | None]:
        return lambda result, row: getattr(result, measure).get(part)

    return [
        Column("stability", "score\nΔ", lambda result, row: getattr(result.stability, "unlearn_score", None)),
        Column("relearn", "re-\nlearn", _relearned, percent=False),
        *(replace(column, title="\nattack", better=None) for column in _attack(results)),
        Column("agreement remain", "same\nremain", by("agreement_by", "remain")),
        Column("agreement forget", "same\nforget", by("agreement_by", "forget")),
        Column("divergence remain", "KL\nremain", by("divergence_by", "remain"), None, False, 2),
        Column("divergence forget", "KL\nforget", by("divergence_by", "forget"), None, False, 2),
    ]


def _relearned(result: Result, row: str) -> float | None:
    if result.relearn is None:
        return None
    return inf if result.relearn.epochs is None else result.relearn.epochs


def _limit(results: Sequence[Result]) -> list[Column]:
    limit = max((result.relearn.limit for result in results if result.relearn is not None), default=0)
    return [Column("relearn", f"epochs, of at most {limit}", _relearned, percent=False)]


FORGETTING = {  # what a scenario is judged by; the columns of a class fill three lines of a terminal, four each
    "category": ("remain", "forget", "same", "cost", "loss attack", "back", "loss before", "probes"),
    "subset": ("remain", "forget", "loss attack", "cost"),
    "poisoned": ("remain", "forget", "score", "attack", "cost"),
    "mislabelled": ("remain", "forget", "cost"),
    "limited": ("remain", "forget", "score"),
    "nothing": ("remain", "forget"),
}
FORGOTTEN = {
    "subset": "forget: accuracy on the samples to forget.",
    "poisoned": "forget: share of the poisoned training samples given the attacker's label.",
    "mislabelled": "forget: share of the wrongly labelled training samples given their wrong label.",
}
AIM = "The aim is Retrain's number; remain and score may be above it, cost should be far below."


def _forgetting(results: Sequence[Result]) -> list[Column]:
    """Accuracies after the last epoch, what is still known, and the cost, as the scenario of these results asks for.

    Bold is for what says by itself how good a method is: the score, and with wrong labels the test accuracy. A high remain accuracy of a
    network that forgot nothing is no merit.
    """

    def ended(measure: str) -> Callable[[Result, str], float | None]:
        return lambda result, row: getattr(result.before if row == ORIGINAL else result.last, measure, None)

    def known(measure: str, place: int | str | None = None) -> Callable[[Result, str], float | None]:
        def value(result: Result, row: str) -> float | None:
            values = getattr(result.evidence, measure, None)
            if place is None or values is None:
                return values
            if isinstance(place, str):
                return values.get(place)
            return values[place] if place < len(values) else None

        return value

    scenarios = [result.cell.scenario for result in results]
    kind = "nothing" if not scenarios else "limited" if any({*LIMITS} & scenario.keys() for scenario in scenarios) else scenarios[0]["kind"]
    evidence = [result.evidence for result in results if result.evidence is not None]
    stages = list(dict.fromkeys(stage for part in evidence for stage in part.probes))
    epochs = [epoch for epoch in (1, 2, 5) if any(epoch < len(part.relearn_unseen) for part in evidence)]
    of_class = kind not in FORGOTTEN
    remain = f"remain: accuracy on {'test samples of the other classes' if of_class else 'all test samples'}."
    forget = FORGOTTEN.get(kind, "forget: accuracy on test samples of the class.")
    back = "back after n: accuracy on test samples of the class after n epochs of training on all data, the class included."
    before = "loss before: loss on the forget samples before that training."
    probe = "probe: share of the test samples of the class that a linear classifier finds in the outputs of that stage."
    same = "same forget: share of the test samples of the class put into the same class as by the retrained network."
    attack = "loss attack: forget samples told from test samples by their loss, area under the curve; 50: they cannot be told apart."
    cost = "cost: epochs of training in percent of a retraining's; passes that compute scores are not counted."
    columns = {
        "remain": [Column("remain", "remain", ended("remain"), "high" if kind == "mislabelled" else None, note=remain)],
        "forget": [Column("forget", "forget", ended("forget"), note=forget)],
        "score": [Column("unlearn_score", "score", ended("unlearn_score"), "high", note="score: remain / (1 + forget).")],
        "attack": [Column("attack", "attack", ended("attack"), note="attack: share of triggered test images given the attacker's label.")],
        "loss attack": [Column("loss_attack", "loss\nattack", known("loss_attack"), note=attack)],
        "back": [Column(f"relearned {epoch}", f"back\nafter {epoch}", known("relearn_unseen", epoch), note=back) for epoch in epochs],
        "loss before": [Column("relearn loss", "loss\nbefore", known("relearn_losses", 0), None, False, note=before)],
        "probes": [
            Column(f"probe {stage}", f"probe\nstage {place}", known("probes", stage), note=probe) for place, stage in enumerate(stages, 1)
        ],
        "same": [Column("same", "same\nforget", lambda result, row: result.agreement_by.get("forget"), note=same)],
        "cost": [Column("cost", "cost", _cost, note=cost, settled=True)],
    }
    return [column for name in FORGETTING[kind] for column in columns[name]]


def _cost(result: Result, row: str) -> float | None:
    if row == ORIGINAL or result.last is None:
        return None
    return share_of_retraining(result.cell.method["name"], result.last.epoch, result.cell.epochs)


VIEWS = {
    "summary": View("accuracies", _summary),
    "evidence": View("evidence", _evidence),
    "masked": View(
        "without fine-tuning",
        lambda results: _scores(lambda result, row: result.history[0] if result.history else None, epochs=False),
        lambda result: result.masked is not None or result.cell.method["name"] == FINETUNE,
    ),
    "best": View(
        "at the epoch chosen on {on}",
        lambda results: _scores(lambda result, row: result.before if row == ORIGINAL else result.best, epochs=True) + _attack(results),
    ),
    "last": View(
        "at the last epoch, without a choice",
        lambda results: _scores(lambda result, row: result.before if row == ORIGINAL else result.last, epochs=False),
    ),
    "stability": View(
        "mean change from epoch to epoch",
        lambda results: [replace(column, better="low") for column in _scores(lambda result, row: result.stability, epochs=False)],
        lambda result: result.stability is not None,
    ),
    "relearn": View("epochs until the forget data are known again; the retrained network's is the measure", _limit),
    "forgetting": View("after the last epoch", _forgetting, by_section=True, note=AIM),
    "remain by epoch": View("remain accuracy after each epoch", _by_epoch("remain")),
    "forget by epoch": View("forget accuracy after each epoch", _by_epoch("forget")),
}
