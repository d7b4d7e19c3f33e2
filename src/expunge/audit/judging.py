"""Give the verdict by stated rules, with the numbers it rests on and what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch

from expunge.audit.findings import Judgement, Measure, Reason, Test
from expunge.audit.intervals import Interval, bootstrap_difference
from expunge.audit.measures import ATTACK, DIVERGENCE, FORGET, NEIGHBOURS, READ_BACK, REMAIN, RMIA, UNSEEN, Kind, Subject
from expunge.audit.policy import Policy
from expunge.audit.reading import Reading
from expunge.audit.shadow_measures import ULIRA, known_by_shadows
from expunge.audit.strata import stratified_auc
from expunge.audit.weighing import weigh
from expunge.runtime.display import counted

OUT = "networks never trained on the forget samples (`out=`, in the shell --never-trained): the loss attack alone is a sanity check"
RETRAINED = "a network retrained without the forget data (`retrained=`, in the shell --retrained)"
WORSE = (
    "retrained networks as good as the original: on other test samples the best is right of {}, the original of {}, so more than the "
    "forget data may tell them apart"
)
COMPARED = (DIVERGENCE, NEIGHBOURS)  # with other networks, beneath the first answer: no share of what the original knew
BEGUN = "where the original began from pretrained weights, one that began from these: its classifier reads such a network, too"
ALIKE = "forget samples like the other training samples of their labels: of these the loss attack and RMIA say nothing by themselves"
ROUNDED = "a test of the inside with power beside rounded weights: probes and re-learning have none here, or were left out"
MORE_SEEDS = "retrained networks of {} seeds or more: fewer do not show how much such networks differ"


def judge(
    measures: Sequence[Measure],
    kind: Kind,
    policy: Policy,
    lost: Reason | None = None,
    gone: Sequence[int] = (),
    unlike: Reason | None = None,
) -> Judgement:
    """The rules, in their order; the first that holds decides. `gone` are the labels that no remain sample has; see `unlike_others`.

    1. damaged: what must stay known is surely lost (`lost`).
    2. cosmetic: the answers changed, and the inside, rounding or the original's own classifier still gives back what was known.
    3. partly: some test tells the network from retrained ones; without these, the answers alone show that it knows.
    4. not distinguished: no test does, and at least one of the answers and one of the inside have the power to.
    5. cannot tell.
    """
    tests = weigh(measures, kind, policy)
    if lost is not None:
        return Judgement("damaged", f"damaged: {lost.words}", (lost,), (), tests)
    named = {measure.name: measure for measure in measures}
    if tests:
        return _beside_retrained(tests, named, policy)
    return _alone(named, kind, policy, gone, unlike)


def _beside_retrained(tests: Sequence[Test], named: Mapping[str, Measure], policy: Policy) -> Judgement:
    told = [test for test in tests if test.found in ("still there", "driven away", "unlike")]
    reasons = tuple(_reason(test, named[test.measure]) for test in sorted(told, key=lambda test: -abs(test.left or 0)))
    seeds = max(len(named[test.measure].retrained) for test in tests)
    missing: tuple[str, ...] = () if seeds >= policy.seeds else (MORE_SEEDS.format(policy.seeds),)
    answered = max((test.left or 0 for test in tests if test.side == "answers" and test.measure not in COMPARED), default=0.0)
    hidden = [test for test in told if test.side == "inside" and test.found == "still there" and (test.left or 0) >= policy.cosmetic_share]
    if hidden and answered < policy.cosmetic_share:
        first = max(hidden, key=lambda test: test.left or 0)
        sentence = f"cosmetic: the answers changed, but “{first.measure}” gives back {_share(first.left)} of what the original network knew"
        return Judgement("cosmetic", sentence, reasons, missing, tuple(tests))
    missing += _worse(named.get(REMAIN))
    if told:
        still = [test.left or 0 for test in told if test.found == "still there"]
        by = _listed(told)
        sentence = f"partly: told from retrained networks by {by}"
        sentence += f"; up to {_share(max(still))} of what the original network knew is there" if still else ""
        return Judgement("partly", sentence, reasons, missing, tuple(tests))
    powered = [test for test in tests if clears(test)]
    if {test.side for test in powered} != {"answers", "inside"}:
        absent = [side for side in ("answers", "inside") if side not in {test.side for test in powered}]
        what = tuple(
            f"a test of the {side} that would show {percent(policy.detectable)} of what the original network knew" for side in absent
        )
        more = (*what, "samples enough, or an original that knew more of them than retrained networks do", *missing)
        sentence = f"cannot tell: no test of the {' or the '.join(absent)} has the power to"
        return Judgement("cannot tell", sentence, tuple(_reason(test, named[test.measure]) for test in tests), more, tuple(tests))
    if all(test.side == "answers" or test.measure.endswith(" bits") for test in powered):
        missing = (ROUNDED, *missing)
    worst = max(test.detectable or 0 for test in powered)
    sentence = (
        f"not distinguished from never trained by {_listed(powered)}, "
        f"at power {policy.power} for {percent(worst)} or more of what the original network knew"
    )
    return Judgement("not distinguished", sentence, tuple(_reason(test, named[test.measure]) for test in powered), missing, tuple(tests))


def _worse(remain: Measure | None) -> tuple[str, ...]:
    """That all retrained networks surely know less of what must stay than the original: they are not what it would have been."""
    if remain is None or remain.before is None or not remain.retrained:
        return ()
    best = max(remain.retrained, key=lambda interval: interval.high)
    return (WORSE.format(percent(best.value, 1), percent(remain.before.value, 1)),) if best.high < remain.before.low else ()


def clears(test: Test) -> bool:
    """Whether a test speaks for a network. That samples go elsewhere than the original's next class clears nobody."""
    return test.found == "not distinguished" and test.measure != NEIGHBOURS


def _alone(named: Mapping[str, Measure], kind: Kind, policy: Policy, gone: Sequence[int], unlike: Reason | None) -> Judgement:
    """Without a retrained network only what a network cannot show by chance convicts, and nothing acquits.

    A probe alone says nothing: features of a network that never saw a class separate it too. Nor do losses of samples that are `unlike`
    the others: a network that never saw wrong labels finds them hard.
    """
    known = [] if unlike else _known(named, kind, policy, "")
    if kind == "samples":
        known += _known_classes(named, gone, policy) + known_by_shadows(named, policy)
    hidden = [] if unlike else [reason for bits in (8, 4) for reason in _known(named, kind, policy, f", {bits} bits")]
    back = named.get(READ_BACK)
    if back is not None and back.after is not None and back.after.low > policy.read_back:
        words = f"the original's classifier reads {percent(back.after.value, 1)} of forgotten and of other samples in its inner outputs"
        words += ", in those of a network retrained from fresh weights far fewer"
        hidden.append(_of(words, back.name, back.after))
    if known:
        hidden = _gives_back(hidden, named, kind, policy)
    if hidden:
        missing = (RETRAINED, BEGUN) if {reason.measure for reason in hidden} == {READ_BACK} else (RETRAINED,)
        return Judgement("cosmetic", f"cosmetic: the answers changed, but {hidden[0].words}", (*hidden, *known), missing)
    if known:
        return Judgement("partly", f"partly: {known[0].words}", tuple(known), (RETRAINED,))
    shown = [named[name] for name in (UNSEEN, FORGET, ATTACK) if name in named]
    reasons = tuple(_of(f"{measure.name} is {_number(measure.after)}", measure.name, measure.after) for measure in shown if measure.after)
    sentence = "cannot tell: nothing gives it away, and without a retrained network nothing clears it"
    if unlike:
        return Judgement("cannot tell", sentence, (unlike, *reasons), (RETRAINED, ALIKE))
    missing = (RETRAINED,) if kind == "classes" or {RMIA, ULIRA} & named.keys() else (RETRAINED, OUT)
    return Judgement("cannot tell", sentence, reasons, missing)


def _gives_back(hidden: Sequence[Reason], named: Mapping[str, Measure], kind: Kind, policy: Policy) -> list[Reason]:
    """What shows `cosmetic_share` of what the original knew of a class, where the answers show less; a network that never saw it has 0."""
    measure = named.get(UNSEEN)
    if kind == "samples" or measure is None or measure.before is None or measure.after is None:
        return []
    least = policy.cosmetic_share * measure.before.value
    return [reason for reason in hidden if reason.value >= least] if measure.after.value < least else []


def _known(named: Mapping[str, Measure], kind: Kind, policy: Policy, bits: str) -> list[Reason]:
    """What a network that never saw the data cannot say: a class it was not trained on, a loss that tells samples it was not given."""
    where = f" with weights of{bits.removeprefix(',')}" if bits else ""
    if kind == "classes":
        measure = named.get(f"{UNSEEN}{bits}")
        if measure is not None and measure.after is not None and measure.after.low > policy.known_accuracy:
            words = f"it gives {percent(measure.after.value, 1)} of unseen samples their forgotten label{where}, a retrained network none"
            return [_of(words, measure.name, measure.after)]
        return []
    reasons = []
    for attack, what in ((ATTACK, f"its loss{where}"), (RMIA, "RMIA")):
        measure = named.get(f"{attack}{bits}")
        if measure is None or measure.after is None:
            continue
        area = measure.after
        if area.low > 0.5 + policy.known_area or area.high < 0.5 - policy.known_area:
            reasons.append(
                _of(f"{what} tells forget samples from unseen ones with area {area.value:.3f}, chance is 0.5", measure.name, area)
            )
    return reasons


def _known_classes(named: Mapping[str, Measure], gone: Sequence[int], policy: Policy) -> list[Reason]:
    """Of samples that were to go together with classes: what it still says of these."""
    rows = [(label, named[f"class {label}"]) for label in gone if f"class {label}" in named]
    return [
        _of(
            f"it gives {percent(row.after.value, 1)} of unseen samples of class {label} their label, a retrained network none",
            row.name,
            row.after,
        )
        for label, row in rows
        if row.after is not None and row.after.low > policy.known_accuracy
    ]


def lost_utility(
    before: Reading, after: Reading, retrained: Sequence[Reading], subject: Subject, measures: Sequence[Measure], policy: Policy
) -> Reason | None:
    """What was surely lost of what must stay: beside the original, or the worst of the retrained networks where that is worse."""
    others = subject.others(before["test"])
    rivals = sorted([before, *retrained], key=lambda reading: int(reading["test"].right[others].sum()))
    theirs, own = (reading["test"].right[others].double() for reading in (rivals[0], after))
    drop = bootstrap_difference(theirs, own, paired=True)
    if drop.low > policy.utility_loss:
        return _of(f"it lost {points(drop.value)} of accuracy on other test samples", REMAIN, drop)
    forgotten = set(subject.gone.tolist())
    for measure in measures:
        label = int(measure.name.removeprefix("class ")) if measure.name.startswith("class ") else None
        if label is None or label in forgotten or measure.before is None or measure.after is None:
            continue
        worst = min([measure.before, *measure.retrained], key=lambda interval: interval.value)
        if worst.low - measure.after.high > policy.class_loss:
            gone = Interval(worst.value - measure.after.value, worst.low - measure.after.high, worst.high - measure.after.low)
            return _of(f"it lost {points(gone.value)} of accuracy on class {label}, which must stay", measure.name, gone)
    return None


def unlike_others(before: Reading, outside: Mapping[str, Mapping[str, Interval]], subject: Subject, policy: Policy) -> Reason | None:
    """What shows that forget samples differ from others by more than having been seen, as wrong labels or those of another source do.

    The original was trained on them as on remain samples, yet its loss tells them from those of the same label; or a network of `outside`,
    by its values, was never trained on them and finds them harder than unseen ones. Then so does any network that never saw them.
    """
    if subject.kind == "classes":
        return None
    forget, remain = before["forget"], before["remain"]
    inside = subject.attacked(forget)
    area = stratified_auc(-forget.losses[inside], -remain.losses, forget.labels[inside], remain.labels)
    if area.low > 0.5 + policy.known_area or area.high < 0.5 - policy.known_area:
        words = f"the original's loss tells forget samples from remain samples, though it was trained on both, with area {area.value:.3f}"
        return _of(words, ATTACK, area)
    for name, values in outside.items():
        if values[ATTACK].high < 0.5 - policy.known_area:
            words = (
                f"{name}, which was never trained on forget samples, finds them harder than unseen ones, area {values[ATTACK].value:.3f}"
            )
            return _of(words, ATTACK, values[ATTACK])
    return None


def saw_forget(values: Mapping[str, Interval], kind: Kind, policy: Policy, gone: Sequence[int] = ()) -> Interval | None:
    """The number by which a network that is called retrained gives away that it was trained on the forget data."""
    if kind == "classes":
        return values[UNSEEN] if values[UNSEEN].low > policy.known_accuracy else None
    for name in (f"class {label}" for label in gone):
        if name in values and values[name].low > policy.known_accuracy:
            return values[name]
    return values[ATTACK] if values[ATTACK].low > 0.5 + policy.known_area else None


def _reason(test: Test, measure: Measure) -> Reason:
    assert measure.after is not None
    beside = f"{_number(measure.after)}; retrained {test.reference:.3g} ± {test.margin:.2g}, original {test.before:.3g}"
    share = "" if test.left is None or test.measure in COMPARED else f", {_share(test.left)} of what the original knew"
    return _of(f"{measure.name}: {test.found}: {beside}{share}", measure.name, measure.after)


def _of(words: str, measure: str, interval: Interval) -> Reason:
    return Reason(words, measure, interval.value, interval.low, interval.high)


def _number(interval: Interval | None) -> str:
    return "" if interval is None else str(interval)


def _share(left: float | None) -> str:
    return percent(max(left or 0, 0))


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _listed(tests: Sequence[Test], limit: int = 4) -> str:
    """Some of both sides, those with the most power first."""
    ranked = {side: sorted((test for test in tests if test.side == side), key=_power) for side in ("answers", "inside")}
    mixed = [test for pair in zip_longest(*ranked.values()) for test in pair if test is not None]
    names = [f"“{test.measure}”" for test in mixed]
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {counted(len(names) - limit, 'more measure')}"


def _power(test: Test) -> float:
    return math.inf if test.detectable is None else test.detectable


def too_few(labels: torch.Tensor, like: torch.Tensor, policy: Policy) -> str | None:
    """What has too few samples for an interval worth a verdict."""
    if len(labels) < policy.samples:
        return f"forget: {counted(len(labels), 'sample')}"
    count = int(like.sum())
    return f"test: {counted(count, 'sample')} of the forgotten labels" if count < policy.samples else None
