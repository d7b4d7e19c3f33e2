"""Measure how far the answers of unlearned networks are from those of retrained ones: KLOM, and a forgotten class's neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from expunge.audit.intervals import Interval, as_scores, auc_interval, bootstrap_mean
from expunge.errors import DivergedError, InputError
from expunge.validate import check_whole

BINS, LARGEST, LEAST_SHARE = 20, 100.0, 1e-5  # of KLOM: bins, the largest |margin|, the least share of a bin of the retrained
FOLDS = 5  # of the cross-validation of an attack


def klom(unlearned: Any, retrained: Any) -> Tensor:
    """KL(unlearned ‖ retrained) of each sample's margins over networks, (M, N) and (R, N), M and R as equal as can be (KLOM).

    Margins, φ = z_y − log Σ_{k≠y} exp z_k, are clipped to ± 100 and counted in 20 bins of equal width from the least to the largest of
    both. With p and q the shares of the bins, q at least 1e-5 where p > 0 and normalised again, KL = Σ p·log(p / q). With few networks it
    is far above 0 for equal distributions too: compare with the KLOM of one half of the retrained against the other.

    Departures: the bins of the program (data-unlearning-bench) leave out the largest value of all, and so does this. Where that leaves
    out all of the unlearned networks, the program's answer is NaN; here the last bin of such a sample takes it in.
    """
    first, second = (_margins(argument, values) for argument, values in (("unlearned", unlearned), ("retrained", retrained)))
    if first.shape[0] != second.shape[0]:
        raise InputError("retrained", f"must be of the same {first.shape[0]} samples", second.shape[0])
    start, end = numpy.minimum(first.min(1), second.min(1)), numpy.maximum(first.max(1), second.max(1))
    edges = numpy.linspace(start, numpy.where(start >= end, start + 1, end), BINS + 1, axis=1)
    counts = [_counts(values, edges) for values in (first, second)]
    missing = counts[0][:, :BINS].sum(1) == 0
    for part in counts:
        part[missing, BINS - 1] += part[missing, BINS]
    own, others = (part[:, :BINS] / numpy.maximum(part[:, :BINS].sum(1, keepdims=True), 1) for part in counts)
    floored = numpy.where(own > 0, numpy.maximum(others, LEAST_SHARE), others)
    floored = floored / floored.sum(1, keepdims=True)
    terms = numpy.where(own > 0, own * numpy.log(numpy.where(own > 0, own, 1) / numpy.where(own > 0, floored, 1)), 0)
    return torch.from_numpy(terms.sum(1))


def _margins(argument: str, values: Any) -> numpy.ndarray:
    """(samples, networks)"""
    signals = torch.as_tensor(values)
    if signals.dim() != 2:
        raise InputError(argument, "must be (networks, samples)", f"shape {tuple(signals.shape)}")
    numbers: numpy.ndarray = as_scores(argument, signals).reshape(signals.shape).T.clamp(-LARGEST, LARGEST).numpy()
    return numbers


def _counts(values: numpy.ndarray, edges: numpy.ndarray) -> numpy.ndarray:
    """Of each bin, per sample, and last of what is at the last edge."""
    bins = torch.searchsorted(*(torch.from_numpy(numpy.ascontiguousarray(part)) for part in (edges, values)), right=True) - 1
    counts = torch.zeros(len(values), BINS + 1, dtype=torch.float64)
    numbers: numpy.ndarray = counts.scatter_add_(1, bins, torch.ones(bins.shape, dtype=torch.float64)).numpy()
    return numbers


@dataclass(frozen=True)
class ClassLeak:
    """How two networks answer for samples of a forgotten class, among the other classes.

    `nearest` is the class that the second network gives most to; `shares` are the mean probabilities of it by the first and the second.
    `distance` is the mean total variation between both answers, `attack` how well a classifier tells whose answer it is, 0.5 by chance.
    """

    nearest: int
    shares: tuple[Interval, Interval]
    distance: Interval
    attack: Interval


def class_leak(unlearned: Tensor, retrained: Tensor, forgotten: int, seed: int = 0) -> ClassLeak:
    """CMIA: a class that was forgotten shows in the probabilities of its neighbours, beside a retrained network's (arXiv 2506.20893).

    Logits (N, K) of both networks on the same unseen samples of the class c. q_k = p_k / (1 − p_c) for k ≠ c;
    distance = mean_n ½ Σ_k |q_k − q'_k|. The attack is a logistic regression on log q, the two answers to a sample in the same of 5
    folds, the area under the curve of the folds left out. Two retrained networks differ too: `class_leak` of these is the floor to
    compare with.

    Departures: written after the paper's abstract, which has no formula; neither its text nor its program was at hand, so values are not
    comparable with the authors'. `neighbours.class_attack` is after reviews of the paper, which say more. Needs scikit-learn.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    first, second = (_remaining(argument, rows, forgotten) for argument, rows in (("unlearned", unlearned), ("retrained", retrained)))
    if first.shape != second.shape:
        raise InputError("retrained", f"must be {tuple(unlearned.shape)}, on the same samples", f"shape {tuple(retrained.shape)}")
    if len(first) < 2 * FOLDS:
        raise InputError("unlearned", f"must hold at least {2 * FOLDS} samples of the class", len(first))
    place = int(second.exp().mean(0).argmax())
    shares = [bootstrap_mean(rows[:, place].exp(), seed=seed) for rows in (first, second)]
    distance = bootstrap_mean((first.exp() - second.exp()).abs().sum(1) / 2, seed=seed)
    rows, whose = torch.cat([first, second]).clamp(min=-LARGEST).numpy(), numpy.repeat([1, 0], len(first))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    samples = numpy.tile(numpy.arange(len(first)), 2)
    scores = cross_val_predict(model, rows, whose, groups=samples, cv=GroupKFold(FOLDS), method="decision_function")
    attack = auc_interval(scores[whose == 1], scores[whose == 0])
    return ClassLeak(place + (place >= forgotten), (shares[0], shares[1]), distance, attack)


def _remaining(argument: str, logits: Tensor, forgotten: int) -> Tensor:
    """log q of all classes but one."""
    if logits.dim() != 2 or logits.shape[1] < 3:
        raise InputError(argument, "must be (N, K), K three classes or more", f"shape {tuple(logits.shape)}")
    check_whole("forgotten", forgotten, minimum=0, maximum=logits.shape[1] - 1)
    rows = logits.detach().to("cpu", torch.float64)
    if broken := int(rows.isnan().any(1).sum()):
        raise DivergedError(f"{argument}: the logits are NaN in {broken} of {len(rows)} rows: the model diverged, nothing was measured")
    return torch.cat([rows[:, :forgotten], rows[:, forgotten + 1 :]], 1).log_softmax(1)
