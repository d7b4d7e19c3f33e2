"""Choose the best epoch of a history, and measure how much accuracies fluctuate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from expunge.errors import InputError
from expunge.metrics.accuracy import unlearn_score


class Measured(Protocol):
    """An epoch and its accuracies by name, such as a `Record` of `unlearn`; records with epoch None, of the model before, are skipped."""

    @property
    def epoch(self) -> int | None: ...

    @property
    def accuracies(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class BestEpoch:
    """`score` is the unlearn score on the data the epoch was chosen on, `accuracies` are all that were recorded then."""

    epoch: int
    chosen_on: Literal["validation", "test"]
    score: float
    accuracies: Mapping[str, float]


def best_epoch(history: Sequence[Measured], on: Literal["validation", "test"] = "validation") -> BestEpoch:
    """The first epoch with the highest unlearn score, epoch 0 (after masking, before any training) among them.

    Chosen by the accuracies "validation remain" and "validation forget". `on="test"`, by "remain" and "forget", is the paper's choice:
    chosen on the reported data it is optimistic, so the result says so.
    """
    if on not in ("validation", "test"):
        raise InputError("on", "must be 'validation' or 'test'", on)
    prefix = "validation " if on == "validation" else ""
    epochs, records = _epochs(history)
    scores = _scores(records, prefix)
    best = max(range(len(scores)), key=scores.__getitem__)
    return BestEpoch(epochs[best], on, scores[best], records[best].accuracies)


@dataclass(frozen=True)
class Stability:
    """Δ of remain accuracy, forget accuracy and unlearn score, as fractions; small is stable."""

    remain: float
    forget: float
    unlearn_score: float


def stability(history: Sequence[Measured]) -> Stability:
    """The fluctuation of "remain", "forget" and the unlearn score over fine-tuning, from epoch 0 on (table finetune_stability)."""
    epochs, records = _epochs(history)
    if epochs != list(range(len(epochs))):
        raise InputError("history", "must hold every epoch from 0 on", epochs)
    scores = _scores(records, "")
    remain, forget = ([record.accuracies[name] for record in records] for name in ("remain", "forget"))
    return Stability(fluctuation(remain), fluctuation(forget), fluctuation(scores))


def fluctuation(values: Sequence[float]) -> float:
    """1/(S − 1) · Σ_{t=1..S} |a_t − a_{t−1}| of a_0 … a_S: S steps over S − 1, as the paper has it, so two steps or more."""
    steps = len(values) - 1
    if steps < 2:
        raise InputError("history", "must hold epoch 0 and at least two epochs of training", f"{len(values)} records")
    return sum(abs(after - before) for before, after in zip(values[:-1], values[1:], strict=True)) / (steps - 1)


def _epochs(history: Sequence[Measured]) -> tuple[list[int], list[Measured]]:
    """The epochs from 0 on, and their records."""
    records = [record for record in history if record.epoch is not None]
    return [record.epoch for record in records if record.epoch is not None], records


def _scores(history: Sequence[Measured], prefix: str) -> list[float]:
    if not history:
        raise InputError("history", "must not be empty")
    remain, forget = f"{prefix}remain", f"{prefix}forget"
    for record in history:
        if not {remain, forget} <= record.accuracies.keys():
            rule = f"needs the accuracies {remain!r} and {forget!r} of every epoch: name both in `watch` of `unlearn`"
            raise InputError("history", rule, sorted(record.accuracies) or "none")
    return [unlearn_score(record.accuracies[remain], record.accuracies[forget]) for record in history]
