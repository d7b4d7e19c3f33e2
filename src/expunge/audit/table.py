"""Lay the measures of all networks beside each other, and compare answers with the retrained networks'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from expunge.audit.findings import Measure, Side
from expunge.audit.intervals import Interval
from expunge.audit.measures import (
    AGREEMENT,
    ATTACK,
    ATTACK_REMAIN,
    DIVERGENCE,
    FORGET,
    NEIGHBOURS,
    REMAIN,
    TRAINING,
    UNSEEN,
    Subject,
    Values,
    words_of,
)
from expunge.audit.neighbours import class_attack
from expunge.audit.reading import Reading
from expunge.audit.similarity import agreement, divergence

STARTS: tuple[tuple[str, Side], ...] = (
    ("class ", "utility"),
    ("remain accuracy", "utility"),
    ("given to", "where"),
    ("probe", "inside"),
    ("CKA", "inside"),
    ("read by", "inside"),
    ("re-learning", "inside"),
)


def side_of(name: str) -> Side:
    if name.endswith(" bits"):
        return "rounded"
    return next((side for start, side in STARTS if name.startswith(start)), "answers")


def measured(readings: Mapping[str, Reading], values: Mapping[str, Values], subject: Subject) -> tuple[Measure, ...]:
    """A measure for every name that the network before or after has a value of, then likeness."""
    others = [name for name in values if name.startswith("retrained")]
    names = dict.fromkeys([*values["before"], *values["after"]])
    measures = [
        Measure(
            name,
            side_of(name),
            words_of(name),
            _samples(name, readings["before"], subject),
            values["before"].get(name),
            values["after"].get(name),
            tuple(values[other][name] for other in others if name in values[other]),
        )
        for name in names
    ]
    if not others:
        return tuple(measures)
    retrained = [readings[other] for other in others]
    return (*measures, *class_attack(readings, retrained, subject), *likeness(readings, retrained, subject))


def likeness(readings: Mapping[str, Reading], retrained: Sequence[Reading], subject: Subject) -> list[Measure]:
    """Agreement and divergence on the forget samples: the mean over the retrained networks, and what every two of these have."""
    chosen = torch.ones(len(retrained[0]["forget"].labels), dtype=torch.bool)

    def agreed(first: Reading, second: Reading) -> Interval:
        return agreement(first["forget"], second["forget"], chosen)

    def diverged(first: Reading, second: Reading) -> Interval:
        return divergence(first["forget"], second["forget"], subject.labels)

    rows = []
    for name, compare, count in (
        (AGREEMENT, agreed, len(chosen)),
        (DIVERGENCE, diverged, len(retrained[0]["forget"].rows)),
    ):
        floor = [compare(first, second) for first, second in combinations(retrained, 2)]
        before, after = (_mean([compare(readings[network], other) for other in retrained]) for network in ("before", "after"))
        rows.append(Measure(name, "likeness", words_of(name), count, before, after, (), tuple(floor)))
    return rows


def _mean(intervals: Sequence[Interval]) -> Interval:
    """The mean of the values and of the ends: the intervals are of the same samples."""
    return Interval(*(sum(getattr(part, end) for part in intervals) / len(intervals) for end in ("value", "low", "high")))


def _samples(name: str, reading: Reading, subject: Subject) -> int:
    test = reading["test"]
    if name.startswith("class "):
        return int((test.labels == int(name.removeprefix("class "))).sum())
    if name.startswith((REMAIN, ATTACK_REMAIN)):
        return int(subject.others(test).sum())
    if name.startswith(ATTACK):
        return int(subject.attacked(test).sum())
    if name == TRAINING:
        return len(reading["remain"].labels)
    if name.startswith(FORGET) and not name.startswith(UNSEEN):
        return len(reading["forget"].labels)
    if name.startswith(("CKA", "RF-JSD", NEIGHBOURS)):
        return len(reading["forget"].rows)
    if name.startswith(("given", "re-learning")):
        return int(subject.asked(reading)[1].sum())
    return int(subject.like(test).sum())
