"""Measure networks, and the method that made them, by shadows: U-LiRA, RULI, KLOM, and the 2023 challenge's ε score."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expunge.audit.distances import klom
from expunge.audit.findings import Measure, Reason
from expunge.audit.intervals import Interval, attack_rates, bootstrap_mean
from expunge.audit.measures import Kind, Values
from expunge.audit.membership import confidence
from expunge.audit.per_sample import values_of
from expunge.audit.policy import Policy
from expunge.audit.shadow_attacks import (
    ShadowSignals,
    epsilons,
    forgetting_quality,
    left_out_scores,
    ruli,
    target_rates,
    u_lira,
)
from expunge.audit.shadow_evidence import ShadowEvidence, of_labels
from expunge.audit.student import reach
from expunge.data.batches import measuring_size
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.metrics.membership import area_under_curve
from expunge.metrics.predictions import logits

ULIRA, RULI, EFFICACY = "U-LiRA", "RULI", "RULI, efficacy"
METHOD, KLOM, QUALITY = "U-LiRA (method)", "KLOM (method)", "ε score (method)"
SHADOW_NAMES = (ULIRA, RULI, METHOD, KLOM, QUALITY)
JUDGED = (ULIRA, RULI)
FLOOR = 1e-6  # of probabilities, in RULI
LARGEST = 1e4  # of |φ|: a logit of −∞, as a filter makes it, is as good as one of −10,000
NETWORKS = 4  # on each side of KLOM and ε: fewer have no histogram and no rate between 0 and 1
SAMPLES = 500  # whose ε is computed, which takes long

AREA = "area under the curve, forgotten candidates against candidates it never saw"
WORDS = {
    ULIRA: f"{AREA}, by the likelihood ratio of normal distributions over shadows that forgot a sample and that never saw it",
    RULI: f"{AREA}, the same by kernel densities",
    EFFICACY: f"{AREA}, the same against shadows before any forgetting; shown, not judged",
    METHOD: "area under the curve of U-LiRA with each shadow in turn attacked by all others: of the method, not of one network",
    KLOM: "KL of the margins of shadows that forgot a sample from those never trained on it, nats, mean over forgotten candidates",
    QUALITY: "the 2023 challenge's F: 1 if no threshold tells shadows that forgot a sample from those never trained on it, else less",
}
HALVES = "; {} networks on each side, since never trained is one half of those against the other"


class Attack(NamedTuple):
    score: Callable[[Tensor, ShadowSignals], Tensor]
    bounded: bool = False
    before_forgetting: bool = False  # whether networks never trained on a sample are shadows before they forgot others


ATTACKS = {
    ULIRA: Attack(u_lira),
    RULI: Attack(ruli, bounded=True),
    EFFICACY: Attack(partial(ruli, kind="efficacy"), bounded=True, before_forgetting=True),
}


def shadow_measures(
    networks: Mapping[str, nn.Module], evidence: ShadowEvidence, kind: Kind, policy: Policy, objective: Objective = Objective()
) -> tuple[Measure, ...]:
    """Of the networks "before", "after" and "retrained 1", ... each attack, and then what says something of the method alone.

    `Measure.shadows` is what shadows have on candidates that they were never trained on, those that the audited network forgot against
    those that it never saw: the mean, and where one more such network would lie. Of whole classes a shadow that never saw half of a class
    was trained on the other half, so measures against networks before any forgetting are left out.
    """
    answers = {name: _signals(network, evidence, objective) for name, network in networks.items()}
    count = int(evidence.forgotten.sum())
    measures: list[Measure] = []
    for attack, how in ATTACKS.items():
        if how.before_forgetting and kind == "classes":
            continue
        signals = evidence.bounded if how.bounded else evidence.signals
        values = {
            name: values_of(attack, target_rates(how.score(found[how.bounded], signals), evidence.forgotten))
            for name, found in answers.items()
        }
        measures += _beside(attack, values, count, _never_trained(how, signals, evidence.forgotten, policy))
    return (*measures, *_of_method(evidence, kind, count))


def _signals(network: nn.Module, evidence: ShadowEvidence, objective: Objective) -> tuple[Tensor, Tensor]:
    """φ of the candidates, and the same with RULI's floor."""
    answers = logits(network, evidence.asked, objective, measuring_size(network))
    of_labels(evidence.labels, answers.targets)
    return confidence(answers.logits, answers.targets).clamp(-LARGEST, LARGEST), confidence(answers.logits, answers.targets, FLOOR)


def _beside(attack: str, values: Mapping[str, Values], count: int, never: Interval) -> list[Measure]:
    others = [name for name in values if name.startswith("retrained")]
    return [
        Measure(
            name,
            "shadows",
            WORDS[attack] if name == attack else f"{WORDS[attack]}: share of the forgotten found",
            count,
            values["before"].get(name),
            values["after"].get(name),
            tuple(values[other][name] for other in others if name in values[other]),
            shadows=never if name == attack else None,
        )
        for name in values["after"]
    ]


def _never_trained(how: Attack, signals: ShadowSignals, forgotten: Tensor, policy: Policy) -> Interval:
    scores = left_out_scores(signals, how.score, signals.trained if how.before_forgetting else signals.unlearned)
    areas = []
    for row, members in zip(scores, signals.members, strict=True):
        sides = row[forgotten & ~members], row[~forgotten & ~members]
        if min(map(len, sides)):
            areas.append(area_under_curve(*sides))
    if len(areas) < 2:
        raise InputError("shadows", "some must have candidates of both kinds that they were never trained on", len(areas))
    mean, far = sum(areas) / len(areas), reach(areas, policy.level)
    return Interval(mean, max(mean - far, 0.0), min(mean + far, 1.0), 1 - policy.level)


def _of_method(evidence: ShadowEvidence, kind: Kind, count: int) -> list[Measure]:
    signals = evidence.signals
    rates = []
    for targets in (signals.trained, signals.unlearned):
        scores = left_out_scores(signals, u_lira, targets)
        rates.append(attack_rates(scores[signals.members], scores[~signals.members]).area)
    measures = [Measure(METHOD, "shadows", WORDS[METHOD], signals.members.numel(), rates[0], rates[1])]
    half = evidence.number // 4
    if kind == "classes" or half < NETWORKS:
        return measures
    chosen = evidence.forgotten.nonzero().flatten()
    never = signals.retrained[:, chosen]
    sides = {"before": signals.remembered[:half, chosen], "after": signals.forgotten[:half, chosen], "shadows": never[:half]}
    others = never[half : 2 * half]
    told = {name: bootstrap_mean(klom(own, others)) for name, own in sides.items()}
    measures.append(_halves(KLOM, told, count, half))
    some = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:SAMPLES]
    worth = {name: _quality(own[:, some], others[:, some]) for name, own in sides.items()}
    if worth["after"] is not None:
        measures.append(_halves(QUALITY, worth, len(some), half))
    return measures


def _halves(name: str, values: Mapping[str, Interval | None], count: int, half: int) -> Measure:
    words = WORDS[name] + HALVES.format(half)
    return Measure(name, "shadows", words, count, values["before"], values["after"], shadows=values["shadows"])


def _quality(own: Tensor, others: Tensor) -> Interval | None:
    found = epsilons(own, others)
    return None if bool(found.isnan().all()) else forgetting_quality(found, len(own)).score


def known_by_shadows(named: Mapping[str, Measure], policy: Policy) -> list[Reason]:
    """Attacks that surely tell the forgotten samples better than of networks never trained on them, where no retrained network is given.

    Surely: the lower end of the difference a − n of both areas, a − n − √((a − a_low)² + (n_high − n)²) (Newcombe's way to put two
    intervals together), is above the policy's `shadow_area`, and so is a_low − 0.5.
    """
    reasons = []
    for name in JUDGED:
        measure = named.get(name)
        if measure is None or measure.after is None or measure.shadows is None:
            continue
        after, never = measure.after, measure.shadows
        surely = after.value - never.value - math.hypot(after.value - after.low, never.high - never.value)
        if min(surely, after.low - 0.5) > policy.shadow_area:
            words = (
                f"{name} tells forget samples from never seen ones with area {after.value:.3f}, "
                f"shadows never trained on either have {never.value:.3f} (up to {never.high:.3f})"
            )
            reasons.append(Reason(words, name, after.value, after.low, after.high))
    return reasons


def ordered(measures: Sequence[Measure]) -> list[Measure]:
    """Those of shadows that a short table has."""
    named = {measure.name: measure for measure in measures}
    return [named[name] for name in SHADOW_NAMES if name in named]
