"""Tell forgotten samples from unseen ones with one to four networks that were never trained on them: RMIA and IAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from expunge.audit.intervals import AttackRates, as_scores, attack_rates
from expunge.errors import DivergedError, InputError
from expunge.metrics.membership import area_under_curve
from expunge.validate import check_choice, check_number, check_whole

OFFLINE = 0.3  # the reference program's `offline_a` where it is not tuned
FIRST, SECOND = 1e-2, 1e-5  # ε₁ and ε₂ of IAM's signal
GAMMA = 0.5772  # Euler's constant, with the digits of the reference program


def confidence(logits: Tensor, labels: Tensor, floor: float | None = None) -> Tensor:
    """φ = log p_y − log(1 − p_y) = z_y − log Σ_{k≠y} exp z_k, from logits (..., N, K) in float64, never from rounded probabilities.

    `floor`, such as RULI's 1e-6, first bounds p_y to [floor, 1 − floor] and the others' sum below by floor, as programs do that begin
    with probabilities: their φ lies within ± log(1/floor) and ties all samples beyond.
    """
    rows, chosen = _with_labels(logits, labels)
    own = rows.gather(-1, chosen).squeeze(-1)
    others = rows.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    if floor is None:
        return own - others
    total = torch.logaddexp(own, others)
    check_number("floor", floor, 0, 0.5, ends="()")
    return (own - total).exp().clamp(floor, 1 - floor).log() - (others - total).exp().clamp(min=floor).log()


def true_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """p_y, the probability of the true class, from logits (..., N, K) in float64."""
    rows, chosen = _with_labels(logits, labels)
    return rows.log_softmax(-1).gather(-1, chosen).squeeze(-1).exp()


def _with_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() < 2 or logits.shape[-1] < 2:
        raise InputError("logits", "must be (..., N, K), a number for each of K classes, two or more", f"shape {tuple(logits.shape)}")
    if labels.is_floating_point() or labels.shape != logits.shape[-2:-1]:
        form = f"{labels.dtype} {tuple(labels.shape)}"
        raise InputError("labels", f"must be one whole number for each of the {logits.shape[-2]} samples", form)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[-1]:
        raise InputError("labels", f"must be from 0 to {logits.shape[-1] - 1}", f"{int(labels.min())} to {int(labels.max())}")
    rows = logits.detach().double()
    if broken := int(rows.isnan().any(-1).sum()):
        raise DivergedError(f"the logits are NaN in {broken} of {rows[..., 0].numel()} rows: the model diverged, nothing was measured")
    return rows, labels.long().to(rows.device)[:, None].expand(*rows.shape[:-1], 1)


@dataclass(frozen=True, eq=False)
class Probabilities:
    """p_y of the same samples by the audited network (N,) and by one or more reference networks that never saw them (R, N)."""

    audited: Tensor
    references: Tensor

    def __post_init__(self) -> None:
        references = torch.as_tensor(self.references)
        object.__setattr__(self, "audited", as_scores("audited", self.audited))
        if references.dim() != 2 or not len(references) or references.shape[1] != len(self.audited):
            rule = f"must be (networks, {len(self.audited)}), a row for each reference network"
            raise InputError("references", rule, f"shape {tuple(references.shape)}")
        object.__setattr__(self, "references", as_scores("references", references).reshape(references.shape))
        for argument in ("audited", "references"):
            values = getattr(self, argument)
            if bool((values < 0).any()) or bool((values > 1).any()):
                raise InputError(argument, "must be probabilities, from 0 to 1", f"{float(values.min())} to {float(values.max())}")


def rmia(samples: Probabilities, population: Probabilities, offline: float = OFFLINE) -> Tensor:
    """RMIA's score of each sample x: the share of population samples z with (p(x)/p̄(x)) / (p(z)/p̄(z)) > 1 (Zarifzadeh et al., 2024).

    p̄(x) = ((1 + a)·mean_r p_r(x) + 1 − a) / 2 stands for the mean over networks with and without x, a = `offline`. The population are
    samples that none of the networks was trained on, as many as there are: the score has no finer steps than 1 / Z.

    Departures: none from the program (privacy-meter) with all its references "out". Its γ is 1; the copy in IAM's
    program has 2. The comparison is by sorting, so memory is one number per sample, not N × Z.
    """
    check_number("offline", offline, 0, 1, ends="[]")
    own, others = _likelihood(samples, offline), _likelihood(population, offline)
    return torch.searchsorted(others.sort().values, own).double() / len(others)


def _likelihood(probabilities: Probabilities, offline: float) -> Tensor:
    return probabilities.audited / ((1 + offline) / 2 * probabilities.references.mean(0) + (1 - offline) / 2)


def tuned_offline(members: Probabilities, others: Probabilities, population: Probabilities) -> float:
    """RMIA's a in 0, 0.1, ..., 1 with the largest area, on a network whose members are known: the original, before it forgot.

    The program tunes on a reference network with known members instead; here the references saw none of the samples.
    """
    grid = [step / 10 for step in range(11)]
    return max(grid, key=lambda a: area_under_curve(rmia(members, population, a), rmia(others, population, a)))


def rmia_rates(forget: Probabilities, unseen: Probabilities, population: Probabilities, offline: float = OFFLINE) -> AttackRates:
    """RMIA on forgotten samples against unseen ones of the same kind; `population` must be others than `unseen`."""
    return attack_rates(rmia(forget, population, offline), rmia(unseen, population, offline))


def completeness_signal(probabilities: Tensor) -> Tensor:
    """IAM's signal (s(p) − s(0)) / (s(1) − s(0)), s(p) = −log(ε₁ − log(ε₂ + p)), ε₁ = 0.01, ε₂ = 1e-5: 0 for p = 0, 1 for p = 1."""
    values = torch.as_tensor(probabilities).double()
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64, device=values.device)
    (least, most), raw = _raw(ends), _raw(values)
    return (raw - least) / (most - least)


def _raw(probabilities: Tensor) -> Tensor:
    return -(FIRST - (SECOND + probabilities).log()).log()


def completeness(
    original: Any, unlearned: Any, references: Any, steps: int = 100, family: Literal["gumbel", "norm"] = "gumbel", pooled: bool = True
) -> Tensor:
    """IAM's completeness of each sample: 1 where the network answers as one that never saw it, 0 where as the original (USENIX 2025).

    c = 1 − Σ_i α_{i+1}·F_i(s) / Σ_i α_{i+1}, i from 0 to steps − 2, α_i = i / (steps − 1). s is the unlearned network's signal, F_i the
    distribution of references moved towards the original, r + α_i·(o − r): its mean over the references, of each sample, and its
    deviation over references and samples (`pooled`, and always with one reference) or over the references alone. "gumbel" for
    `completeness_signal` of probabilities, "norm" for `confidence`.

    Departures: the formula weights F_α by α itself; the program, and this, by the next α.
    """
    check_whole("steps", steps, minimum=2)
    check_choice("family", family, ("gumbel", "norm"))
    original, unlearned = as_scores("original", original), as_scores("unlearned", unlearned)
    references = torch.as_tensor(references).detach().to("cpu", torch.float64)
    if references.dim() != 2 or not len(references) or references.shape[1] != len(unlearned):
        rule = f"must be (networks, {len(unlearned)}), a row for each reference network"
        raise InputError("references", rule, f"shape {tuple(references.shape)}")
    if len(original) != len(unlearned):
        raise InputError("original", f"must be as many as the {len(unlearned)} of unlearned", len(original))
    as_scores("references", references)
    alphas = torch.linspace(0, 1, steps, dtype=torch.float64)
    total = torch.zeros_like(unlearned)
    for place, weight in zip(alphas[:-1], alphas[1:], strict=True):
        moved = references + (original - references) * place
        pool = pooled or len(references) == 1
        deviation = moved.std(correction=0) if pool else moved.std(0, correction=0)
        total += weight * _share_below(unlearned, moved.mean(0), deviation, family)
    return 1 - total / alphas[1:].sum()


def _share_below(values: Tensor, mean: Tensor, deviation: Tensor, family: str) -> Tensor:
    """The distribution function, by moments."""
    if family == "norm":
        return torch.special.ndtr((values - mean) / (deviation + 1e-30))
    scale = (6**0.5 / torch.pi * deviation).clamp(min=1e-30)
    return (-(-(values - (mean - scale * GAMMA)) / scale).exp()).exp()


def completeness_rates(forget: Probabilities, unseen: Probabilities, forget_before: Any, unseen_before: Any) -> AttackRates:
    """1 − completeness of forgotten samples against unseen ones; `before` are p_y by the original network.

    Where the original answers as the references do, as it may on unseen samples, completeness is chance. The authors tell forgotten from
    *remain* samples, on which all but the references agree: their area is 1 − that of this function with remain samples as `unseen`.
    """
    return attack_rates(incompleteness(forget, forget_before), incompleteness(unseen, unseen_before))


def incompleteness(samples: Probabilities, before: Any) -> Tensor:
    """1 − completeness of each sample, from probabilities; `before` are p_y by the original network."""
    original, unlearned, references = map(completeness_signal, (torch.as_tensor(before), samples.audited, samples.references))
    return 1 - completeness(original, unlearned, references)
