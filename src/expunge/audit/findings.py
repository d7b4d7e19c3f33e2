"""Hold what an audit found: measures beside each other, tests against the retrained networks, reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from expunge.audit.intervals import Interval
from expunge.storage.codec import Count, Number

Side = Literal["utility", "answers", "inside", "rounded", "where", "likeness", "shadows"]
Found = Literal["still there", "driven away", "unlike", "not distinguished", "no power"]
Word = Literal["not distinguished", "partly", "cosmetic", "damaged", "cannot tell"]


@dataclass(frozen=True)
class Measure:
    """One measure of every network; None where it was not measured.

    `floor` are the values that every two retrained networks have, where a measure compares networks. `n` are the samples. `shadows`: of
    measures by shadows, what networks never trained on the samples have, where one more of them would lie.
    """

    name: str
    side: Side
    words: str
    n: Count
    before: Interval | None
    after: Interval | None
    retrained: tuple[Interval, ...] = ()
    floor: tuple[Interval, ...] = ()
    shadows: Interval | None = None


@dataclass(frozen=True)
class ShadowsUsed:
    """How many shadows an audit had, how each of them forgot, and how many candidates were forgotten and never seen."""

    number: Count
    method: str
    forgotten: Count
    never_seen: Count


@dataclass(frozen=True)
class Test:
    """One measure judged against the retrained networks, whose mean is `reference`.

    A network that was never trained on the data lies within `margin` of the reference. `left` is the share of what the original knew,
    (after − reference) / (before − reference), with `low` and `high` from the interval of `after`; `detectable` is the smallest share that
    the test would have shown with the policy's power, infinite where before and reference are equal (then None).
    """

    __test__ = False  # not one of pytest's

    measure: str
    side: Literal["answers", "inside"]
    before: Number
    after: Number
    reference: Number
    margin: Number
    left: Number | None
    low: Number | None
    high: Number | None
    detectable: Number | None
    found: Found


@dataclass(frozen=True)
class Reason:
    """A sentence, and the number it rests on."""

    words: str
    measure: str
    value: Number
    low: Number
    high: Number


@dataclass(frozen=True)
class Judgement:
    """The verdict in a word and in a sentence, what it rests on, and what is missing for a better one."""

    word: Word
    sentence: str
    reasons: tuple[Reason, ...] = ()
    missing: tuple[str, ...] = ()
    tests: tuple[Test, ...] = ()


@dataclass(frozen=True)
class Histogram:
    """How many samples have a loss within each pair of edges; the last bin holds all above it too."""

    edges: tuple[Number, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """Before re-learning and after each round of it."""

    losses: tuple[Number, ...]
    forget: tuple[float, ...]
    unseen: tuple[float, ...]


@dataclass(frozen=True)
class Pictures:
    """What figures need: losses by network ("before", "after", "retrained 1") and set, and curves by network."""

    losses: Mapping[str, Mapping[str, Histogram]]
    curves: Mapping[str, Curve]
