"""Ask where samples of a forgotten class go among the classes that stay: where the original, or retrained networks, had them next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from expunge.audit.findings import Measure
from expunge.audit.intervals import Interval
from expunge.audit.measures import CMIA, NEIGHBOURS, Subject, Values, rate, words_of
from expunge.audit.reading import Part, Reading
from expunge.metrics.probing import fitted

FEWEST = 4  # classes that stay: among two or three, retrained networks send whole classes where the original did, or not, by chance
LEAST = -30.0  # of a log probability: beyond, it says no more


def neighbours(reading: Reading, subject: Subject, original: Reading) -> Values:
    """The share of forget samples that go to the class which the original has next, argmax_{k stays} z_k for both networks.

    A network that never saw the class sends its samples to classes that are like it, by its own lights; one that was made from the original
    to give them away, sample by sample, sends them where the original's second thoughts were. Of classes alone, where four or more
    stay: with fewer the rule of the verdict would accuse 2 to 3 % of networks that were retrained (docs/audit.md).
    """
    stays = _staying(reading["forget"], subject)
    if subject.kind == "samples" or int(stays.sum()) < FEWEST:
        return {}
    first, second = (network["forget"].logits[:, stays].argmax(1) for network in (reading, original))
    return {NEIGHBOURS: rate(first == second)}


def class_attack(readings: Mapping[str, Reading], retrained: Sequence[Reading], subject: Subject) -> list[Measure]:
    """CMIA: is a forgotten class taken for its nearest class as often as by retrained networks?

    q_k = p_k / Σ_{j stays} p_j. The nearest class n of a forgotten class c is the largest of the mean q over retrained networks and unseen
    samples of c. A linear classifier is fitted to log q of each network's own remain samples, those of n against all others; the value is
    the share of unseen samples of c that it takes for samples of n.

    Departures: the authors' program (CrowdDynamicsLab/ICML_TREW) was not at hand. This is after public reviews of the paper (arXiv
    2506.20893), which tell of classifiers per class on a network's outputs, the nearest class by several retrained networks, and the gap to
    these. Theirs is a support vector machine, this a logistic regression.
    """
    known = readings["before"]["remain"].sampled_labels
    if subject.kind == "samples" or len(known.unique()) < 2 or not len(_asked(readings["before"]["test"], subject)):
        return []
    nearest = _nearest(retrained, subject, known.unique())
    before, after, *others = (_taken(network, subject, nearest) for network in (readings["before"], readings["after"], *retrained))
    return [Measure(CMIA, "answers", words_of(CMIA), len(_asked(readings["before"]["test"], subject)), before, after, tuple(others))]


def _staying(part: Part, subject: Subject) -> Tensor:
    return ~torch.isin(torch.arange(part.classes), subject.gone)


def _asked(test: Part, subject: Subject) -> Tensor:
    """The numbers of the unseen samples of forgotten classes among those whose logits are kept."""
    return torch.isin(test.sampled_labels, subject.gone).nonzero().flatten()


def _shares(part: Part, subject: Subject) -> Tensor:
    """log q, a column per class; those of the forgotten classes are least."""
    logs = part.logits.double().masked_fill(~_staying(part, subject), -torch.inf).log_softmax(1)
    return logs.clamp(min=LEAST)


def _nearest(retrained: Sequence[Reading], subject: Subject, known: Tensor) -> dict[int, int]:
    """By forgotten class, among the classes that the remain samples have."""
    mean = torch.stack([_shares(network["test"], subject).exp() for network in retrained]).mean(0)
    labels = retrained[0]["test"].sampled_labels
    present = [label for label in subject.gone.tolist() if (labels == label).any()]
    return {label: int(known[mean[labels == label].mean(0)[known].argmax()]) for label in present}


def _taken(network: Reading, subject: Subject, nearest: Mapping[int, int]) -> Interval:
    remain, test = network["remain"], network["test"]
    known = _shares(remain, subject)
    mean, deviation = known.mean(0), known.std(0, correction=0) + 1e-6
    asked = ((_shares(test, subject) - mean) / deviation).float()
    taken = []
    for neighbour in sorted({*nearest.values()}):
        weights = fitted(((known - mean) / deviation).float(), (remain.sampled_labels == neighbour).long(), 2)
        near = torch.tensor([label for label, other in nearest.items() if other == neighbour])
        taken.append((asked[torch.isin(test.sampled_labels, near)] @ weights[:-1] + weights[-1]).argmax(1) == 1)
    return rate(torch.cat(taken))
