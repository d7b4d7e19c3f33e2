"""Measure one network by what was read of it: utility, answers on the forget data, what its inner outputs still show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from expunge.audit.features import LAST
from expunge.audit.findings import Curve
from expunge.audit.intervals import Interval, clopper_pearson
from expunge.audit.reading import Part, Reading
from expunge.audit.similarity import cka_interval, retrain_free_divergence
from expunge.audit.strata import stratified_auc
from expunge.errors import InputError
from expunge.metrics.probing import fitted

Kind = Literal["classes", "samples"]
Values = dict[str, Interval]  # by the measure's name

UNSEEN, FORGET = "forget accuracy (unseen)", "forget accuracy"
REMAIN, TRAINING = "remain accuracy (unseen)", "remain accuracy"
ATTACK, ATTACK_REMAIN = "loss attack on forget", "loss attack on remain"
DIVERGED, READ_BACK, RELEARNED = "RF-JSD", "read by the original's classifier", "re-learning"
RMIA, IAM = "RMIA on forget", "IAM on forget"
AGREEMENT, DIVERGENCE = "agreement with retrained", "divergence from retrained"
NEIGHBOURS, CMIA = "neighbours as the original's", "CMIA"

WORDS = {
    UNSEEN: "share of test samples of the forgotten labels that are right",
    FORGET: "share of the forget samples that are right",
    REMAIN: "share of the other test samples that are right",
    TRAINING: "share of the remain samples that are right",
    ATTACK: "a sanity check, never evidence alone: area under the curve of a lower loss on forget than on unseen samples of the same label",
    ATTACK_REMAIN: "the same of remain samples: forgetting can make others easier to tell",
    DIVERGED: "between mean outputs on forget samples and the original's on unseen ones of their labels, nats",
    READ_BACK: "the original's own classifier on this network's inner outputs: the smaller share right, of forgotten and of other labels",
    RELEARNED: "mean share of forgotten samples right while a copy trains on all data for a few steps at a small rate",
    RMIA: "area under the curve of RMIA, forget samples against unseen ones of the same label, by networks never trained on them",
    IAM: "the same of 1 − completeness, which interpolates between those networks and the original",
    AGREEMENT: "share of forget samples given the same class as by a retrained network, mean over these",
    NEIGHBOURS: "share of forget samples given to that class, of those that stay, which the original has next",
    CMIA: "share of unseen samples of the class that a classifier of this network's answers takes for the nearest class of retrained ones",
    DIVERGENCE: "Jensen and Shannon's, of answers on forget samples from a retrained network's, nats, mean over these",
}


def words_of(name: str) -> str:
    if name in WORDS:
        return WORDS[name]
    before, _, after = name.partition(", ")
    if after.endswith("bits"):
        return f"{WORDS[name.rpartition(', ')[0]]}; every weight matrix rounded, one scale per output channel"
    if after.startswith("found at"):
        return f"{WORDS[before]}: share of forget samples found"
    described = {
        "class": "share of test samples of this class that are right",
        "given": "share of the forgotten samples, unseen where a class is forgotten, that this class is given to",
        "probe": f"recall of the forgotten labels, unseen samples, by a linear classifier fitted to the outputs at {after}",
        "CKA to the original": f"likeness of forget samples' outputs at {after} to the original network's: 1 is the same up to a rotation",
    }
    return next(text for start, text in described.items() if name.startswith(start))


@dataclass(frozen=True)
class Subject:
    """What was to be forgotten: whole classes (no remain sample has the labels) or samples of classes that stay.

    `gone` are the labels that no remain sample has: all of whole classes; some where samples and a class were to go together.
    """

    kind: Kind
    labels: Tensor
    gone: Tensor

    @classmethod
    def of(cls, forget: Part, remain: Part) -> Subject:
        labels = forget.labels.unique()
        gone = labels[~torch.isin(labels, remain.labels)]
        return cls("classes" if len(gone) == len(labels) else "samples", labels, gone)

    def like(self, test: Part) -> Tensor:
        """The unseen samples that are like the forgotten."""
        return test.of_labels(self.labels)

    def others(self, part: Part) -> Tensor:
        """Samples that must stay known."""
        return ~part.of_labels(self.gone)

    def attacked(self, part: Part) -> Tensor:
        """Samples whose losses are compared: a network that never saw a class has large ones on it, so of samples those that stay alone."""
        return part.of_labels(self.labels) & (self.others(part) | (self.kind == "classes"))

    def asked(self, reading: Reading) -> tuple[Part, Tensor]:
        """The samples whose answers show most: unseen ones of a class, or the forget samples themselves."""
        if self.kind == "classes":
            return reading["test"], self.like(reading["test"])
        return reading["forget"], torch.ones(len(reading["forget"].labels), dtype=torch.bool)


def rate(right: Tensor) -> Interval:
    return _exact(int(right.sum()), right.numel())


@lru_cache(4096)
def _exact(right: int, count: int) -> Interval:
    """Shares repeat: networks of one audit are asked the same samples."""
    return clopper_pearson(right, count)


def utility(reading: Reading, subject: Subject) -> Values:
    """Accuracy on what must stay, whole and by class."""
    test, remain = reading["test"], reading["remain"]
    values = {REMAIN: rate(test.right[subject.others(test)]), TRAINING: rate(remain.right)}
    for label in test.labels.unique().tolist():
        values[f"class {label}"] = rate(test.right[test.labels == label])
    return values


def answers(reading: Reading, subject: Subject, original: Reading) -> Values:
    """What the network says of the forgotten samples."""
    forget, test = reading["forget"], reading["test"]
    like = subject.like(test)
    values = {UNSEEN: rate(test.right[like]), FORGET: rate(forget.right), **attacks(reading, subject)}
    values[DIVERGED] = retrain_free_divergence(forget, original["test"], subject.labels)
    return values


def attacks(reading: Reading, subject: Subject) -> Values:
    """Within labels: the mix of labels may differ between the sets, and then tells samples by itself."""
    forget, remain, test = (reading[name] for name in ("forget", "remain", "test"))
    return {
        ATTACK: _loss_attack(forget, subject.attacked(forget), test, subject.attacked(test)),
        ATTACK_REMAIN: _loss_attack(remain, torch.ones_like(remain.right), test, subject.others(test)),
    }


def _loss_attack(members: Part, inside: Tensor, others: Part, outside: Tensor) -> Interval:
    if not torch.isin(others.labels[outside], members.labels[inside]).any():
        raise InputError("test", "must hold samples of the labels of the forget and of the remain data, to compare losses with", "none")
    return stratified_auc(-members.losses[inside], -others.losses[outside], members.labels[inside], others.labels[outside])


def destinations(reading: Reading, subject: Subject) -> Values:
    """Where forgotten samples go."""
    part, chosen = subject.asked(reading)
    counts = torch.bincount(part.predicted[chosen], minlength=part.classes).tolist()
    return {f"given to class {label}": _exact(count, sum(counts)) for label, count in enumerate(counts)}


def probes(reading: Reading, subject: Subject) -> Values:
    """What a linear classifier reads in the outputs at each place. Of samples of classes that stay it would say nothing."""
    if subject.kind == "samples":
        return {}
    values: Values = {}
    for earlier, name in zip((None, *reading.places.names), reading.places.names, strict=False):
        same = earlier is not None and all(_same(part, earlier, name) for part in reading.parts.values())
        values[f"probe, {name}"] = values[f"probe, {earlier}"] if same else probe(reading, subject, name)
    return values


def _same(part: Part, first: str, second: str) -> bool:
    """As the end of the last stage and the classifier's input often are."""
    return torch.equal(part.features[first], part.features[second])


def beside_original(reading: Reading, subject: Subject, original: Reading) -> Values:
    """What the original's own classifier reads in the inner outputs, and how like the original's these are."""
    shared = [name for name in reading.places.names if name in original.places.names]
    ours, theirs = reading["forget"].features, original["forget"].features
    values = {f"CKA to the original, {name}": cka_interval(ours[name], theirs[name]) for name in shared}
    # Of one class that stays the classifier's answers are a single yes or no: one strange network in 20 has both right by chance.
    several = len(reading["remain"].labels.unique()) > 1
    if subject.kind == "classes" and several and (back := read_back(reading, subject, original)) is not None:
        values[READ_BACK] = back
    return values


def probe(reading: Reading, subject: Subject, place: str) -> Interval:
    """Fitted to the samples kept of forget and remain together, asked of those of the test set that are like the forgotten."""
    known = torch.cat([reading[name].features[place] for name in ("forget", "remain")])
    labels = torch.cat([reading[name].sampled_labels for name in ("forget", "remain")])
    mean, deviation = known.mean(0), known.std(0, correction=0) + 1e-6
    weights = fitted((known - mean) / deviation, labels, reading["test"].classes)
    test = reading["test"]
    like = torch.isin(test.sampled_labels, subject.labels)
    asked = ((test.features[place][like] - mean) / deviation) @ weights[:-1] + weights[-1]
    return rate(asked.argmax(1) == test.sampled_labels[like])


def read_back(reading: Reading, subject: Subject, original: Reading) -> Interval | None:
    """Both shares must be high: by chance a strange network's outputs may be read as one class, but not as all of them.

    None where the original's classifier does not fit this network.
    """
    features = reading["test"].features.get(LAST)
    if original.classifier is None or features is None or features.shape[1] != original.classifier[0].shape[1]:
        return None
    weight, bias = original.classifier
    right = (features @ weight.T + bias).argmax(1) == reading["test"].sampled_labels
    like = torch.isin(reading["test"].sampled_labels, subject.labels)
    return min(rate(right[like]), rate(right[~like]), key=lambda interval: interval.value)


def at_bits(reading: Reading, subject: Subject, bits: int) -> Values:
    """The answers of a network whose weights were rounded."""
    part, chosen = subject.asked(reading)
    name = UNSEEN if subject.kind == "classes" else FORGET
    values = {
        name: rate(part.right[chosen]),
        REMAIN: rate(reading["test"].right[subject.others(reading["test"])]),
        **attacks(reading, subject),
    }
    return {f"{name}, {bits} bits": value for name, value in values.items()}


def relearned(curve: Curve, subject: Subject, n: int) -> Values:
    """The mean over the rounds, with the interval of one round: the rounds are of the same samples."""
    shares = (curve.unseen if subject.kind == "classes" else curve.forget)[1:]
    mean = sum(shares) / len(shares)
    around = _exact(round(mean * n), n)
    return {RELEARNED: Interval(mean, min(around.low, mean), max(around.high, mean))}
