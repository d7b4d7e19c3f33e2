"""Audit a network that was to forget: read, measure, compare with retrained networks, judge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from expunge.audit.checks import check_sets, listed_networks
from expunge.audit.findings import Curve, Pictures, ShadowsUsed
from expunge.audit.intervals import Interval
from expunge.audit.judging import judge, lost_utility, saw_forget, too_few, unlike_others
from expunge.audit.keeping import Keep, computed, key_of
from expunge.audit.measures import (
    ATTACK,
    RELEARNED,
    UNSEEN,
    Subject,
    Values,
    answers,
    at_bits,
    beside_original,
    destinations,
    probes,
    relearned,
    utility,
)
from expunge.audit.neighbours import neighbours
from expunge.audit.per_sample import per_sample_attacks
from expunge.audit.pictures import edges_of, histograms
from expunge.audit.policy import Policy, load_policy
from expunge.audit.reading import Reading, check_alike, read, same_answers
from expunge.audit.relearning import relearn
from expunge.audit.report import Audit
from expunge.audit.rounding import rounded
from expunge.audit.settings import Settings
from expunge.audit.shadow_evidence import ShadowEvidence, check_candidates, check_evidence
from expunge.audit.shadow_measures import shadow_measures
from expunge.audit.table import measured
from expunge.audit.threads import fitting_threads
from expunge.data.batches import Data, as_batches
from expunge.data.digest import data_digest
from expunge.data.objective import Objective, check_objective
from expunge.errors import ExpungeError, InputError, UncheckedWarning
from expunge.model.checks import check_module
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import one_thread
from expunge.runtime.progress import announce, is_shown
from expunge.storage.tensors import weights_digest
from expunge.validate import shown


def audit(
    before: nn.Module,
    after: nn.Module,
    forget: Data,
    remain: Data,
    test: Data,
    retrained: nn.Module | Sequence[nn.Module] | None = None,
    out: Sequence[nn.Module] = (),
    *,
    shadows: ShadowEvidence | None = None,
    objective: Objective = Objective(),
    settings: Settings = Settings(),
    policy: Policy | None = None,
    done: str = "",
    keep: Keep = computed,
    progress: bool | None = None,
) -> Audit:
    """Say what can be said about whether `after` still knows the forget data, how sure, and what cannot be said.

    `before` is the original network, `after` the one that was to forget; `test` holds samples that neither was trained on, some of them
    with the labels of the forget data. `retrained` are networks trained on the remain data alone, of other seeds: without one, a network
    can be convicted but not cleared. `out` are networks that were never trained on the forget samples, one to four, on whatever else: with
    them every sample is attacked by itself (RMIA, IAM). `shadows` is what many networks that forgot by the same method say of single
    samples (`audit.shadows.Shadows(...).evidence(method, forgotten)`): U-LiRA, RULI, KLOM and the 2023 challenge's ε score. The rules and
    thresholds are those of `policy`; see docs/audit.md.

    All networks, their modes and all random states stay as they are. `done` says in words how `after` was made, for the report. `keep` may
    store parts that take long (`keeping.Folder`).
    """
    check_module(before, "before")
    check_module(after, "after")
    check_objective(objective)
    references, strangers = listed_networks("retrained", retrained), listed_networks("out", out)
    if not isinstance(settings, Settings):
        raise InputError("settings", "must be Settings(...)", shown(settings))
    if not isinstance(policy, Policy | None):
        raise InputError("policy", "must be a Policy, such as load_policy(path)", shown(policy))
    if not isinstance(done, str):
        raise InputError("done", "must be words on how the network was made", shown(done))
    if not callable(keep):
        raise InputError("keep", "must be callable, such as keeping.Folder(path)", shown(keep))
    policy = load_policy() if policy is None else policy
    if shadows is not None:
        check_evidence(shadows, before, policy)
    talk = is_shown(progress)
    given = {"forget": forget, "remain": remain, "test": test}
    # An iterator can be read once, and every network reads.
    sets = {name: as_batches(data, name) if isinstance(data, Iterator) else data for name, data in given.items()}
    check_sets(sets, objective, talk)
    networks = {"before": before, "after": after} | {f"retrained {number}": net for number, net in enumerate(references, start=1)}
    outside_networks = {f"out {number}": network for number, network in enumerate(strangers, start=1)}
    audited = _Audited(before, sets, objective, settings, policy, keep, talk)
    readings = {name: audited.read(name, network) for name, network in networks.items()}
    subject = Subject.of(readings["before"]["forget"], readings["before"]["remain"])
    if few := too_few(readings["before"]["forget"].labels, subject.like(readings["before"]["test"]), policy):
        argument, _, number = few.partition(": ")
        raise InputError(
            argument, f"must hold {policy.samples} samples or more (policy.samples), fewer have no interval worth a verdict", number
        )
    if not subject.others(readings["before"]["test"]).any():
        raise InputError("test", "must hold samples of labels that stay, beside those of the forgotten", "forgotten labels alone")
    if shadows is not None:
        check_candidates(shadows, readings["before"])
    found = {name: audited.values(name, network, readings, subject) for name, network in networks.items()}
    outside = {name: audited.read(name, network) for name, network in outside_networks.items()}
    values, curves = {name: part[0] for name, part in found.items()}, {name: part[1] for name, part in found.items()}
    told = {name: utility(reading, subject) | answers(reading, subject, readings["before"]) for name, reading in outside.items()}
    if subject.kind == "classes" and saw_forget(values["before"], subject.kind, policy) is None:
        what = f"does not know the forgotten class (accuracy on unseen samples {values['before'][UNSEEN]})"
        warnings.warn(f"before: {what}; it must be the network that was trained on it, not the one after", UncheckedWarning, stacklevel=3)
    used = _unaware(readings, outside, values | told, subject, policy)
    outside = {name: reading for name, reading in outside.items() if name in used}
    readings = {name: reading for name, reading in readings.items() if name in used}
    values = {name: found_values for name, found_values in values.items() if name in used}
    if outside:
        attacked = {name: per_sample_attacks(readings[name], readings["before"], [*outside.values()], subject) for name in values}
        values = {name: part | attacked[name] for name, part in values.items()}
    measures = measured(readings, values, subject)
    if shadows is not None:
        announce(f"attacks by {shadows.number} shadows", talk)
        with audited.threads():
            measures += shadow_measures({name: networks[name] for name in values}, shadows, subject.kind, policy, objective)
    retrained_readings = [reading for name, reading in readings.items() if name.startswith("retrained")]
    lost = lost_utility(readings["before"], readings["after"], retrained_readings, subject, measures, policy)
    same = same_answers(readings["before"], readings["after"])  # then nothing was done, and losses tell
    unlike = None if same else unlike_others(readings["before"], {name: told[name] for name in outside}, subject, policy)
    edges = edges_of(readings["before"], readings["after"])
    return Audit(
        verdict=judge(measures, subject.kind, policy, lost, subject.gone.tolist(), unlike),
        kind=subject.kind,
        labels=tuple(subject.labels.tolist()),
        sizes={name: len(part.labels) for name, part in readings["before"].parts.items()},
        retrained=len(retrained_readings),
        measures=measures,
        policy=policy,
        settings=settings,
        weights={name: weights_digest(network) for name, network in (networks | outside_networks).items()},
        data={name: data_digest(data) for name, data in sets.items()},
        pictures=Pictures(
            {name: histograms(reading, subject, edges) for name, reading in readings.items()},
            {name: curve for name, curve in curves.items() if curve is not None and name in used},
        ),
        done=done,
        shadows=None if shadows is None else _used(shadows),
    )


def _used(shadows: ShadowEvidence) -> ShadowsUsed:
    forgotten = int(shadows.forgotten.sum())
    return ShadowsUsed(shadows.number, shadows.method, forgotten, len(shadows.forgotten) - forgotten)


def _unaware(
    readings: Mapping[str, Reading], outside: Mapping[str, Reading], values: Mapping[str, Values], subject: Subject, policy: Policy
) -> set[str]:
    """The names of all networks but those that are no reference: trained on the forget data, by what they show, or given before.

    The audited network beside itself would be cleared, and one retrained network given five times would pass for five seeds.
    """
    used = {"before", "after"}
    together = {**readings, **outside}
    for name, reading in together.items():
        argument, _, number = name.partition(" ")
        if name in ("before", "after"):
            continue
        rivals = [other for other in used if other in ("before", "after") or other.startswith(argument)]
        again = min((other for other in rivals if same_answers(together[other], reading)), default=None)
        if (sign := saw_forget(values[name], subject.kind, policy, subject.gone.tolist())) is not None:
            attacked = sign is values[name][ATTACK]
            what = "loss attack on the forget samples" if attacked else "accuracy on unseen samples of the forgotten class"
            why = f"seems to have been trained on the forget data ({what} {sign})"
            why += ", or these are easier than the unseen samples of their labels" if attacked else ""
        elif again is not None:
            why = f"has the answers of {again}, to the bit, and is the same network"
        else:
            used.add(name)
            continue
        warnings.warn(f"{argument}: network {number} {why}; it is left out", UncheckedWarning, stacklevel=level_of_caller())
    return used


def _on_one_thread(measure: Callable[..., Values], *arguments: Any) -> Values:
    """Small matrices, for which threads are slower."""
    with one_thread():
        return measure(*arguments)


class _Audited:
    """The data and settings that all networks have in common."""

    def __init__(
        self,
        original: nn.Module,
        sets: Mapping[str, Data],
        objective: Objective,
        settings: Settings,
        policy: Policy,
        keep: Keep,
        talk: bool,
    ) -> None:
        self.threads = fitting_threads(original, sets["forget"])
        self.sets, self.objective, self.settings, self.policy, self.keep, self.talk = sets, objective, settings, policy, keep, talk
        self.data = [data_digest(data) for data in sets.values()]
        self.first: Reading | None = None

    def read(self, name: str, network: nn.Module) -> Reading:
        announce(f"{name}: reading the data", self.talk)
        try:
            with self.threads():
                reading = read(network, self.sets, self.objective, self.settings.batch_size, self.settings.sample, name)
        except InputError as error:
            if self.first is None and error.argument == "batches":  # of the first batch of the forget data
                raise InputError("forget", error.rule, error.found) from error
            if self.first is None or error.argument == "objective":
                raise
            if error.rule.startswith("labels must be in"):  # the original has them all
                rule = f"must have as many classes as the original network, {self.first['forget'].classes}; its {error.rule}"
                raise InputError(name, rule, error.found) from error
            raise InputError(name, f"must be a network like the original; {error.argument}: {error.rule}", error.found) from error
        self.first = self.first or reading
        check_alike(self.first, reading, name)
        return reading

    def values(self, name: str, network: nn.Module, readings: Mapping[str, Reading], subject: Subject) -> tuple[Values, Curve | None]:
        with self.threads():
            return self._values(name, network, readings, subject)

    def _values(self, name: str, network: nn.Module, readings: Mapping[str, Reading], subject: Subject) -> tuple[Values, Curve | None]:
        reading, original = readings[name], readings["before"]
        values = utility(reading, subject) | answers(reading, subject, original) | destinations(reading, subject)
        values |= neighbours(reading, subject, original)
        key = key_of(network, reading, self.data)
        origin = key_of(network, reading, self.data, original)
        sample = self.settings.sample
        values |= self._kept(f"probes {key} {sample}", lambda: _on_one_thread(probes, reading, subject))
        values |= self._kept(f"beside the original {origin} {sample}", lambda: _on_one_thread(beside_original, reading, subject, original))
        for bits in self.settings.bits:
            announce(f"{name}: weights of {bits} bits", self.talk)
            values |= self._kept(f"{bits} bits {key}", self._at_bits(network, subject, bits))
        curve = self._relearned(name, network, reading, subject, key)
        if curve is not None:
            asked = subject.asked(reading)[1]
            values |= relearned(curve, subject, int(asked.sum()))
        return values, curve

    def _kept(self, key: str, compute: Callable[[], Values]) -> Values:
        return dict(self.keep(key, Mapping[str, Interval], compute))

    def _at_bits(self, network: nn.Module, subject: Subject, bits: int) -> Callable[[], Values]:
        def compute() -> Values:
            reading = read(rounded(network, bits), self.sets, self.objective, self.settings.batch_size, 1, f"{bits} bits", inside=False)
            return at_bits(reading, subject, bits)

        return compute

    def _relearned(self, name: str, network: nn.Module, reading: Reading, subject: Subject, key: str) -> Curve | None:
        """None where it is switched off, or where the network cannot be trained: a filter of infinities has no gradient."""
        settings = self.settings
        if not settings.rounds:
            return None
        announce(f"{name}: {RELEARNED}, {settings.rounds} rounds", self.talk)
        like: Tensor = subject.like(reading["test"]).nonzero().flatten()
        label = f"re-learning {key} {settings.rounds} {settings.steps} {settings.rate} {settings.seed} {settings.batch_size}"

        def compute() -> Any:
            try:
                return relearn(network, self.sets, like, settings, self.objective)
            except ExpungeError as error:
                if name in ("before", "after"):
                    return None
                raise InputError(name, "must be a network that can be trained, for re-learning", str(error)) from error

        return self.keep(label, Curve | None, compute)
