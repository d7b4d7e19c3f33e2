"""Weigh a measure of a network against the retrained networks' values: is it one of them, and would we see it if not?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

from expunge.audit.findings import Found, Measure, Test
from expunge.audit.measures import AGREEMENT, ATTACK, DIVERGENCE, FORGET, NEIGHBOURS, READ_BACK, RELEARNED, RMIA, UNSEEN, Kind
from expunge.audit.policy import Policy
from expunge.audit.shadow_measures import JUDGED as BY_SHADOWS
from expunge.audit.student import reach, spread

PROBE = "probe, "


def judged(measure: Measure, kind: Kind) -> Literal["answers", "inside"] | None:
    """Which side a measure speaks for in the verdict; None: it is shown and not judged.

    What says nothing by itself is not judged: CKA is high for any network that began from the original, the attack on remain is of others,
    shares of single classes are in the divergence, and CMIA differs so much between retrained networks that it tells none of the cheats.
    """
    name, _, bits = measure.name.rpartition(", ")
    if bits.endswith("bits"):
        return "inside" if name == (UNSEEN if kind == "classes" else ATTACK) else None
    of_kind = (UNSEEN,) if kind == "classes" else (ATTACK, RMIA, *BY_SHADOWS)
    if measure.name in (DIVERGENCE, FORGET, NEIGHBOURS, *of_kind):
        return "answers"
    return "inside" if measure.name in (READ_BACK, RELEARNED) or measure.name.startswith(PROBE) else None


def weigh(measures: Sequence[Measure], kind: Kind, policy: Policy) -> tuple[Test, ...]:
    """A test for every measure that is judged and has a value of before, of after and of retrained networks."""
    sides = [(measure, side) for measure in measures if (side := judged(measure, kind)) is not None]
    usable = [(measure, side) for measure, side in sides if measure.before and measure.after and _references(measure)]
    return tuple(_weighed(measure, side, len(usable), policy) for measure, side in usable)


def _references(measure: Measure) -> list[float]:
    """The values of networks that were never trained on the data; of two networks compared, of pairs of them."""
    return [interval.value for interval in (measure.floor if measure.name in (AGREEMENT, DIVERGENCE) else measure.retrained)]


def _weighed(measure: Measure, side: Literal["answers", "inside"], tests: int, policy: Policy) -> Test:
    assert measure.before is not None and measure.after is not None
    values = _references(measure)
    networks = len(values) if measure.retrained else round((1 + math.sqrt(1 + 8 * len(values))) / 2)  # pairs: m·(m − 1)/2
    reference = sum(values) / len(values)
    before, after = measure.before.value, measure.after.value
    gap = before - reference
    # Of the samples: shares of few samples lie on few steps, and networks that are equal by chance have no spread.
    theirs = (measure.floor or measure.retrained)[0]
    noise = math.hypot(*(interval.high - interval.low for interval in (measure.after, theirs))) / 2 / NormalDist().inv_cdf(0.975)
    margin = NormalDist().inv_cdf(1 - policy.level / tests / 2) * noise
    if measure.name == NEIGHBOURS:
        # Networks that never saw a class have neighbours of their own for it, far apart; a copy of the original's lies beyond all of them.
        margin = max(margin, policy.neighbours * abs(gap), max(values) - reference)
    elif networks >= policy.seeds:
        # Of the seeds: under the null this network's value is one more like theirs.
        margin = max(margin, reach(values, policy.level / tests, networks), policy.smallest_share * abs(gap))
        noise = max(noise, spread(values) * math.sqrt(1 + 1 / networks))
    else:  # one network or two do not show how much networks differ
        margin = max(margin, policy.share_without_seeds * abs(gap))
        if measure.name == DIVERGENCE:  # which varies as much as it is large, also where the original is no farther than they are
            margin = max(margin, reference)
    if measure.name == READ_BACK:
        # By chance a strange network is read in part: a value that is far from normal, so that its spread says little.
        margin = max(margin, policy.read_back * abs(gap))
    needed = margin + NormalDist().inv_cdf(policy.power) * noise
    detectable = needed / abs(gap) if gap else None
    left, low, high = ((value - reference) / gap if gap else None for value in (after, measure.after.low, measure.after.high))
    if low is not None and high is not None and low > high:
        low, high = high, low
    found = _found(measure.name, after - reference, gap, margin)
    # Any network's features separate a class, more or less by its seed, and networks that began from the same weights are read by each
    # other's classifier; how much by the seed, few networks do not show. Where the original is read no better than these, the margin is of
    # the samples alone, and there is nothing that could be left.
    blind = networks < policy.seeds and (measure.name.startswith(PROBE) or measure.name == READ_BACK) and abs(gap) <= margin
    if blind or (found == "not distinguished" and (detectable is None or detectable > policy.detectable)):
        found = "no power"
    return Test(measure.name, side, before, after, reference, margin, left, low, high, detectable, found)


def _found(name: str, difference: float, gap: float, margin: float) -> Found:
    if abs(difference) <= margin or not math.isfinite(margin):
        return "not distinguished"
    if name in (DIVERGENCE, NEIGHBOURS):  # nearer to them, or elsewhere than the original's, is no trace
        return "unlike" if difference > 0 else "not distinguished"
    if difference * gap > 0 and abs(gap) > margin:
        return "still there"
    # Below chance, or beyond a reference that the original does not differ from: above it nothing was driven away.
    return "driven away" if difference < 0 else "unlike"
