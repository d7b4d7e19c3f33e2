"""Compare two networks by what they make of the same samples: inner outputs by CKA, answers by a divergence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expunge.audit.intervals import Interval, bootstrap_mean, clopper_pearson
from expunge.audit.reading import Part

DRAWS = 100  # of a bootstrap of CKA, which is a ratio of sums over all pairs


def cka(first: Tensor, second: Tensor) -> float:
    """Linear CKA = ‖YᵀX‖² / (‖XᵀX‖·‖YᵀY‖) of centred features X and Y, a row per sample: 1 where they differ by a rotation and a scale.

    Kornblith et al., 2019, equation 4; 0 where one of them is constant.
    """
    x, y = (features.double() - features.double().mean(0) for features in (first, second))
    norms = torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y)
    return float(torch.linalg.matrix_norm(y.T @ x) ** 2 / norms) if norms > 0 else 0.0


def cka_interval(first: Tensor, second: Tensor, seed: int = 0, draws: int = DRAWS) -> Interval:
    """CKA, and percentiles of it over samples drawn with replacement, at most 500 at a time."""
    numbers = torch.Generator().manual_seed(seed)
    size = min(len(first), 500)
    drawn = []
    for _ in range(draws):
        rows = torch.randint(len(first), (size,), generator=numbers)
        drawn.append(cka(first[rows], second[rows]))
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    value = cka(first, second)
    return Interval(value, min(low, value), max(high, value))


def agreement(first: Part, second: Part, chosen: Tensor) -> Interval:
    """The share of the chosen samples that both networks give the same class, right or wrong."""
    same = (first.predicted == second.predicted)[chosen]
    return clopper_pearson(int(same.sum()), len(same))


def divergences(first: Tensor, second: Tensor) -> Tensor:
    """Jensen and Shannon's divergence per sample, ½·KL(p ‖ m) + ½·KL(q ‖ m), m = (p + q)/2, in nats: 0 where equal, at most log 2.

    It is finite also where a network gives a class no probability at all, as a filter does.
    """
    logs = [torch.log_softmax(logits.double(), 1) for logits in (first, second)]
    middle = torch.logaddexp(*logs) - torch.tensor(2.0, dtype=torch.float64).log()
    terms = [torch.where(log == -torch.inf, 0.0, log.exp() * (log - middle)).sum(1) for log in logs]
    return ((terms[0] + terms[1]) / 2).clamp(min=0)


def divergence(first: Part, second: Part, labels: Tensor) -> Interval:
    """The mean divergence on the samples kept that have one of the labels."""
    chosen = torch.isin(first.sampled_labels, labels)
    return bootstrap_mean(divergences(first.logits[chosen], second.logits[chosen]), draws=500)


def retrain_free_divergence(after: Part, original: Part, labels: Tensor, seed: int = 0, draws: int = DRAWS) -> Interval:
    """RF-JSD (LoTUS): the mean over the labels of the divergence between two mean outputs of a label, in nats.

    `after` is the new network on the forget samples, `original` the original one on held-out samples. The value is of all samples; the
    interval is as wide as a bootstrap of those that are kept, drawn label by label, about its own mean, since a divergence of fewer
    samples is larger.
    """
    with_both = [label for label in labels.tolist() if after.counts[label] and original.counts[label]]
    value = float(divergences(after.outputs[with_both].log(), original.outputs[with_both].log()).mean())
    kept = [label for label in with_both if all(bool((part.sampled_labels == label).any()) for part in (after, original))]
    if not kept:
        return Interval(value, 0.0, math.log(2))
    generator = torch.Generator().manual_seed(seed)
    spread = torch.stack(
        [divergences(*(_drawn_means(part, kept, generator).log() for part in (after, original))).mean() for _ in range(draws)]
    )
    low, high = (spread - spread.mean()).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(value, max(0.0, value + min(low, 0.0)), min(math.log(2), value + max(high, 0.0)))


def _drawn_means(part: Part, labels: list[int], generator: torch.Generator) -> Tensor:
    """The mean outputs of the kept samples of each label, drawn with replacement."""
    means = []
    for label in labels:
        rows = part.sampled_labels.eq(label).nonzero().squeeze(1)
        drawn = rows[torch.randint(len(rows), (len(rows),), generator=generator)]
        means.append(torch.softmax(part.logits[drawn].double(), 1).mean(0))
    return torch.stack(means)
