"""Tell forgotten samples from never seen ones by many shadow networks: U-LiRA, RULI, and the 2023 challenge's ε."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from expunge.audit.intervals import AttackRates, Interval, as_scores, attack_rates, bootstrap_mean
from expunge.errors import DivergedError, InputError
from expunge.validate import check_choice, check_number

CAP = 50.0  # the largest ε of the challenge
STEPS = 100  # its thresholds per unit of φ
BUFFER = 2.0  # how far its two thresholds move around the narrower of both distributions
BUCKET = 0.5  # the width in ε within which a sample has the same worth

Density = Callable[[Tensor, Tensor, Tensor], Tensor]  # values (N,), signals (S, N) and which of them count (S, N): log density (N,)


@dataclass(frozen=True, eq=False)
class ShadowSignals:
    """φ (`membership.confidence`) of N candidate samples by S shadow networks, (S, N) each.

    Every shadow was trained on the candidates where `members` is true, and then unlearned those: `trained` is φ before, `unlearned` after.
    So over the shadows a candidate was forgotten where it is a member, and where it is not, never seen by a network that forgot others.
    """

    trained: Tensor
    unlearned: Tensor
    members: Tensor

    def __post_init__(self) -> None:
        members = torch.as_tensor(self.members)
        if members.dim() != 2 or members.dtype != torch.bool:
            raise InputError("members", "must be boolean, (shadows, samples)", f"{members.dtype} {tuple(members.shape)}")
        for argument in ("trained", "unlearned"):
            values = torch.as_tensor(getattr(self, argument))
            if values.shape != members.shape:
                raise InputError(argument, f"must be {tuple(members.shape)}, as members", f"shape {tuple(values.shape)}")
            object.__setattr__(self, argument, as_scores(argument, values).reshape(members.shape))
            if not torch.isfinite(getattr(self, argument)).all():
                raise DivergedError(f"{argument}: some signals are infinite: a shadow diverged, nothing was measured")
        object.__setattr__(self, "members", members.cpu())
        count = members.sum(0)
        if len(members) and bool((count < 2).any() or (len(members) - count < 2).any()):
            least = int(torch.minimum(count, len(members) - count).min())
            raise InputError("members", "every sample must be in at least two shadows and missing from at least two", least)

    @property
    def forgotten(self) -> Tensor:
        """φ of each sample by the shadows that forgot it, after they did, (S/2, N); see `retrained`."""
        return self._picked(self.unlearned, self.members)

    @property
    def retrained(self) -> Tensor:
        """φ of each sample by the shadows that were never trained on it, before they forgot others: for KLOM and ε.

        Those are defined for one forget set. Here each shadow forgot another, as large, so they are of the method, not of one request.
        """
        return self._picked(self.trained, ~self.members)

    @property
    def remembered(self) -> Tensor:
        """φ of each sample by the shadows that were trained on it, before they forgot it."""
        return self._picked(self.trained, self.members)

    def _picked(self, signals: Tensor, wanted: Tensor) -> Tensor:
        counts = wanted.sum(0).unique()
        if len(counts) != 1:
            raise InputError("members", "every sample must be in as many shadows as any other", f"{int(counts[0])} to {int(counts[-1])}")
        return signals.gather(0, wanted.long().argsort(dim=0, descending=True, stable=True))[: int(counts)]

    def without(self, *shadows: int) -> ShadowSignals:
        """All but these."""
        rest = [number for number in range(len(self.members)) if number not in shadows]
        return ShadowSignals(self.trained[rest], self.unlearned[rest], self.members[rest])


def u_lira(target: Any, shadows: ShadowSignals) -> Tensor:
    """U-LiRA's log likelihood ratio of each candidate: log N(φ; forgotten) − log N(φ; never seen) (Hayes et al., 2024).

    φ = `target` is the audited network's; mean and deviation (over n, not n − 1) are of `unlearned` where it is a member and where it is
    not. Above 0 forgotten is likelier; `torch.sigmoid` of it is the probability of DeepUnlearn's program.

    Departures: DeepUnlearn's program has, in place of φ, whether the answer is right (0 or 1), scores the networks that the Gaussians were
    fitted to, and divides by zero where a deviation is 0; here 1e-30 is added. The authors' own program was not at hand.
    """
    return _ratio(target, shadows.unlearned, shadows.unlearned, shadows.members, _normal)


def ruli(target: Any, shadows: ShadowSignals, kind: Literal["privacy", "efficacy"] = "privacy") -> Tensor:
    """RULI's log likelihood ratio: as `u_lira` by kernel densities, Gaussian kernels of width 1 (Naderloui et al., 2025).

    log mean_j exp(−(φ − φ_j)²/2) over the forgotten, less the same over the never seen. "privacy": the latter by networks that unlearned
    others; "efficacy": by networks before any unlearning, so the network is compared with retrained ones. `torch.sigmoid` of it is the
    program's number. Its φ are `confidence(..., floor=1e-6)`.

    Departures: in the program a third of the shadows keeps each sample; those are not in either density, so here there are none.
    """
    check_choice("kind", kind, ("privacy", "efficacy"))
    return _ratio(target, shadows.unlearned, shadows.unlearned if kind == "privacy" else shadows.trained, shadows.members, _kernels)


def _ratio(target: Any, forgotten: Tensor, never: Tensor, members: Tensor, density: Density) -> Tensor:
    values = as_scores("target", target)
    if len(values) != members.shape[1]:
        raise InputError("target", f"must be one signal for each of the {members.shape[1]} candidates", len(values))
    return density(values, forgotten, members) - density(values, never, ~members)


def _normal(values: Tensor, signals: Tensor, counted: Tensor) -> Tensor:
    number = counted.sum(0)
    mean = torch.where(counted, signals, 0.0).sum(0) / number
    deviation = (torch.where(counted, (signals - mean).square(), 0.0).sum(0) / number).sqrt() + 1e-30
    return -((values - mean) / deviation).square() / 2 - deviation.log() - math.log(2 * math.pi) / 2


def _kernels(values: Tensor, signals: Tensor, counted: Tensor) -> Tensor:
    exponents = torch.where(counted, -(values - signals).square() / 2, -torch.inf)
    return exponents.logsumexp(0) - counted.sum(0).double().log() - math.log(2 * math.pi) / 2


def target_rates(scores: Any, forgotten: Any) -> AttackRates:
    """One network audited: scores of candidates it forgot against those of candidates it never saw, `forgotten` false."""
    scores, mask = as_scores("scores", scores), torch.as_tensor(forgotten).cpu()
    if mask.dtype != torch.bool or mask.shape != scores.shape:
        raise InputError("forgotten", f"must be boolean, one for each of the {len(scores)} scores", f"{mask.dtype} {tuple(mask.shape)}")
    return attack_rates(scores[mask], scores[~mask])


def method_rates(shadows: ShadowSignals, score: Callable[[Tensor, ShadowSignals], Tensor] = u_lira) -> AttackRates:
    """The method audited, not one network: each shadow in turn is the target of an attack by the others, scores taken together.

    The intervals take scores as independent. Those of one shadow or one sample are not quite, so they are somewhat too narrow.
    """
    scores = left_out_scores(shadows, score, shadows.unlearned)
    return attack_rates(scores[shadows.members], scores[~shadows.members])


def left_out_scores(shadows: ShadowSignals, score: Callable[[Tensor, ShadowSignals], Tensor], targets: Tensor) -> Tensor:
    """The scores (S, N) of each shadow's own signals, a row of `targets`, by all other shadows.

    Where another shadow has just the candidates that it has not, as in the pairs of `shadows.memberships`, that is left out too: with the
    target alone missing, one of the two distributions has a network less and is narrower, always on the side of the truth.
    """
    rows = []
    for number, members in enumerate(shadows.members):
        partner = (shadows.members == ~members).all(1).nonzero().flatten().tolist()[:1]
        rows.append(score(targets[number], shadows.without(number, *partner)))
    return torch.stack(rows)


def vulnerability(shadows: ShadowSignals) -> Tensor:
    """|μ_in − μ_out| / (σ_in + σ_out) of φ before unlearning (after Carlini et al., 2022): how much training on it shows.

    RULI tells results on the most vulnerable samples and on protected ones apart, since a mean over all hides the former.
    """
    ends = []
    for counted in (shadows.members, ~shadows.members):
        number = counted.sum(0)
        mean = torch.where(counted, shadows.trained, 0.0).sum(0) / number
        ends.append((mean, (torch.where(counted, (shadows.trained - mean).square(), 0.0).sum(0) / number).sqrt()))
    (inside, first), (outside, second) = ends
    return (inside - outside).abs() / (first + second + 1e-30)


def epsilons(unlearned: Any, retrained: Any, delta: float = 1e-5) -> Tensor:
    """The 2023 NeurIPS challenge's ε of each sample, from φ by M unlearned and M retrained networks, (M, N) each.

    ε = max over attacks of max(log((1 − δ − FPR)/FNR), log((1 − δ − FNR)/FPR)), at least 0, at most 50. Attacks: φ above a threshold (100
    per unit, from the least to the largest φ); φ between two thresholds around the narrower distribution. FPR = FNR = 0 gives ∞; attacks
    with one of them 0 are discarded. One range below 1 % of the other gives 50. NaN where no attack is left: too few networks to tell.

    Departures: the released program has its single thresholds in float32, and its assertion on the kept attacks raises for more than one.
    """
    check_number("delta", delta, 0, 1, ends="[)")
    first, second = _networks("unlearned", unlearned), _networks("retrained", retrained)
    if first.shape != second.shape:
        raise InputError("retrained", f"must be {first.shape}, as unlearned", second.shape)
    swapped = numpy.median(second, axis=0) > numpy.median(first, axis=0)  # the positive is the one with the larger median
    positive, negative = numpy.where(swapped, second, first), numpy.where(swapped, first, second)
    pairs = zip(numpy.sort(positive, axis=0).T, numpy.sort(negative, axis=0).T, strict=True)
    return torch.tensor([_epsilon(own, others, delta) for own, others in pairs], dtype=torch.float64)


def _networks(argument: str, signals: Any) -> numpy.ndarray:
    values = torch.as_tensor(signals)
    if values.dim() != 2 or len(values) < 2:
        raise InputError(argument, "must be (networks, samples), two networks or more", f"shape {tuple(values.shape)}")
    numbers: numpy.ndarray = as_scores(argument, values).reshape(values.shape).numpy()
    return numbers


def _epsilon(positive: numpy.ndarray, negative: numpy.ndarray, delta: float) -> float:
    """Of one sample, both sorted."""
    widths = [part[-1] - part[0] for part in (positive, negative)]
    if max(widths) > 0 and min(widths) / max(widths) < 0.01:
        return CAP
    # All that counts of an attack are how many of each it calls positive.
    size = len(negative) + 1
    called = numpy.concatenate([_between(positive, negative), _above(positive, negative)], axis=1)
    counts = numpy.divmod(numpy.bincount(called[0] * size + called[1]).nonzero()[0], size)
    missed, wrong = (len(positive) - counts[0]) / len(positive), counts[1] / len(negative)
    if bool(((missed == 0) & (wrong == 0)).any()):
        return CAP
    kept = (missed > 0) & (wrong > 0)
    missed, wrong = missed[kept], wrong[kept]
    ratios = numpy.concatenate([(1 - delta - wrong) / missed, (1 - delta - missed) / wrong])
    ratios = ratios[ratios > 0]  # below, there is no such ε
    return float(numpy.clip(numpy.log(ratios.max()), 0, CAP)) if len(ratios) else math.nan


def _above(positive: numpy.ndarray, negative: numpy.ndarray) -> numpy.ndarray:
    least, largest = min(positive[0], negative[0]), max(positive[-1], negative[-1])
    thresholds = numpy.linspace(least, largest, math.ceil((largest - least) * STEPS))
    return numpy.stack([len(part) - numpy.searchsorted(part, thresholds, "left") for part in (positive, negative)])


def _between(positive: numpy.ndarray, negative: numpy.ndarray) -> numpy.ndarray:
    """Called positive is the narrower one, whichever that is: (its count, the other's)."""
    if positive[-1] - positive[0] >= negative[-1] - negative[0]:
        positive, negative = negative, positive
    width = positive[-1] - positive[0]
    start, end = positive[0] + width - BUFFER, positive[-1] + BUFFER
    right = numpy.linspace(start, end, math.ceil((end - start) * STEPS))
    left = numpy.linspace(right - width - BUFFER, right - width + BUFFER, math.ceil(2 * BUFFER * STEPS), axis=1)
    return numpy.stack(
        [
            numpy.maximum(numpy.searchsorted(part, right, "right")[:, None] - numpy.searchsorted(part, left, "left"), 0).ravel()
            for part in (positive, negative)
        ]
    )


@dataclass(frozen=True)
class ForgettingQuality:
    """The challenge's F with its interval over samples; `undecided` samples, whose ε is NaN, are left out."""

    score: Interval
    samples: int
    undecided: int


def forgetting_quality(values: Any, networks: int, seed: int = 0) -> ForgettingQuality:
    """F = mean over samples of 2^(−⌊ε / 0.5⌋), and 0 from the last whole bucket of width 0.5 below ⌈log(M − 1)⌉ on, M networks each.

    The challenge's final score is F × (remain accuracy / retrained's) × (test accuracy / retrained's).
    """
    found = torch.as_tensor(values).double().flatten()
    decided = found[~found.isnan()]
    if not len(decided) or networks < 2:
        raise InputError("values", "must hold an ε that more networks than one could tell", f"{len(found)} samples, {networks} networks")
    buckets = math.floor(math.ceil(math.log(networks - 1)) / BUCKET)
    worth = torch.where(decided < buckets * BUCKET, 2.0 ** -(decided / BUCKET).floor(), 0.0)
    return ForgettingQuality(bootstrap_mean(worth, seed=seed), len(decided), len(found) - len(decided))
