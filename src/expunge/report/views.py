"""Define views of results: which of their numbers are the columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from expunge.experiments.paper import ORIGINAL
from expunge.experiments.results import Result

FINETUNE = "finetune"


@dataclass(frozen=True)
class Column:
    """`value(result, row)`: None where there is none, inf where it is beyond a limit. `better` says what is printed in bold."""

    key: str
    title: str
    value: Callable[[Result, str], float | None]
    better: Literal["high", "low"] | None = None
    percent: bool = True
    digits: int = 1


@dataclass(frozen=True)
class View:
    """One view of an experiment; `columns` may depend on the results."""

    title: str
    columns: Callable[[Sequence[Result]], list[Column]]
    shows: Callable[[Result], bool] = lambda result: True  # whether a method has such numbers


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


def _forgetting(results: Sequence[Result]) -> list[Column]:
    """Accuracies after the last epoch, what is still known, and the cost; columns that no result has are left out."""

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

    stages = list(dict.fromkeys(stage for result in results if result.evidence is not None for stage in result.evidence.probes))
    epochs = max((len(result.evidence.relearn_unseen) for result in results if result.evidence is not None), default=0)
    columns = [
        Column("remain", "remain", ended("remain"), "high"),
        Column("forget", "forget", ended("forget")),
        Column("unlearn_score", "score", ended("unlearn_score")),
        Column("attack", "attack", ended("attack")),
        Column("loss_attack", "loss\nattack", known("loss_attack")),
        *(Column(f"relearned {epoch}", f"back\nafter {epoch}", known("relearn_unseen", epoch)) for epoch in (1, 2, 5) if epoch < epochs),
        Column("relearn loss", "loss\nbefore", known("relearn_losses", 0), None, False),
        *(Column(f"probe {stage}", f"probe\n{stage}", known("probes", stage)) for stage in stages),
        Column("same", "same\nforget", lambda result, row: result.agreement_by.get("forget")),
        Column("cost", "cost,\n%", _cost),
    ]
    return [column for column in columns if any(column.value(result, "") is not None for result in results)]


def _cost(result: Result, row: str) -> float | None:
    """Epochs of training over those of a retraining."""
    if row == ORIGINAL or result.last is None:
        return None
    return result.last.epoch / result.cell.epochs


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
    "forgetting": View("after the last epoch, beside the retrained network", _forgetting),
    "remain by epoch": View("remain accuracy after each epoch", _by_epoch("remain")),
    "forget by epoch": View("forget accuracy after each epoch", _by_epoch("forget")),
}
