"""Compare scores within labels alone, where the mix of labels would tell members from others by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from expunge.audit.intervals import Interval, area_interval, as_scores, auc_variance, check_confidence
from expunge.errors import InputError
from expunge.metrics.membership import area_under_curve


def stratified_auc(members: Any, others: Any, member_labels: Tensor, other_labels: Tensor, confidence: float = 0.95) -> Interval:
    """The share of pairs of the same label in which the member's score is the larger, equal ones counted half.

    θ̂ = Σ_l w_l·θ̂_l, θ̂_l the area under the curve within label l, w_l = m_l·n_l / Σ_k m_k·n_k of m_l members and n_l others. Scores of two
    labels are never compared: members of hard labels would look unknown, and of easy ones known. A label that only one side has does not
    count. The interval is all θ with |θ̂ − θ| ≤ z·√(Σ_l w_l²·V_l(θ)), V_l Newcombe's variance; for one label it is that of `auc_interval`.
    """
    check_confidence(confidence)
    members, others = as_scores("members", members), as_scores("others", others)
    for argument, scores, labels in (("member_labels", members, member_labels), ("other_labels", others, other_labels)):
        if labels.shape != scores.shape:
            raise InputError(argument, f"must be {len(scores)} labels, one per score", f"shape {tuple(labels.shape)}")
    pairs = [*_pairs(members, others, member_labels, other_labels)]
    if not pairs:
        raise InputError("others", "must hold samples of the members' labels", "none")
    areas = numpy.array([area_under_curve(inside, outside) for inside, outside in pairs])
    sizes = numpy.array([(len(inside), len(outside)) for inside, outside in pairs], dtype=numpy.float64).T
    weights = sizes[0] * sizes[1] / (sizes[0] @ sizes[1])
    # Of equal areas exactly that area: a weighted sum of ones may miss 1 by its last digit.
    area = float(areas[0]) if (areas == areas[0]).all() else float(weights @ areas)
    return area_interval(area, lambda theta: float(weights**2 @ auc_variance(theta, *sizes)), confidence)


def _pairs(members: Tensor, others: Tensor, member_labels: Tensor, other_labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The scores of members and of others of each label that both have."""
    both = torch.from_numpy(numpy.intersect1d(member_labels.numpy(), other_labels.numpy()))
    yield from zip(_by_label(members, member_labels, both), _by_label(others, other_labels, both), strict=True)


def _by_label(scores: Tensor, labels: Tensor, wanted: Tensor) -> list[Tensor]:
    """Sorted once: a thousand labels do not cost a thousand passes over all scores."""
    order = labels.argsort()
    ordered, places = scores[order], labels[order]
    starts, ends = (torch.searchsorted(places, wanted, right=right).tolist() for right in (False, True))
    return [ordered[start:end] for start, end in zip(starts, ends, strict=True)]
