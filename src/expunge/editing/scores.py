"""Score what to mask: one number per weight or channel, the largest are masked first."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from expunge.errors import InputError, MismatchError
from expunge.validate import check_amount, check_choice, check_seed

if TYPE_CHECKING:
    from expunge.fisher.sums import FisherSums
    from expunge.model.activations import Activations

Score = dict[str, Tensor]  # parameter name -> float64 tensor of the parameter's shape; of channels: layer name -> one number each

RATIO_GUARD = 1e-8  # of the mean remain Fisher: far below what a living weight has, far above what rounding leaves in a dead one


def fisher_difference(forget: FisherSums, remain: FisherSums | None = None, remain_weight: float | None = None) -> Score:
    """Weights that matter to the forget samples more than to the remain samples.

    s_j = F̄_f,j − λ·F̄_r,j, with F̄ the mean over each set; without `remain` the forget term alone.

    Paper: M is the top R of F_f,jj − F_r,jj, sums over each set ("the factor |D| is dropped"). That is the default, λ = n_r/n_f, times n_f:
    the same ranking, here in the unit of every other λ.
    Departures: the released program subtracts averages (λ = 1), of squared batch gradients.
    """
    _check_sums("forget", forget)
    if remain_weight is not None:
        check_amount("remain_weight", remain_weight)
    if remain is None:
        if remain_weight is not None:
            raise InputError("remain_weight", "needs `remain`", remain_weight)
        return {name: forget_mean.double() for name, forget_mean in forget.mean().items()}
    _check_sums("remain", remain)
    forget.check_compatible(remain)
    if remain_weight is None:
        # Subtracted as sums, so that the ranking is the paper's to the last bit and not up to the rounding of n_r/n_f.
        return {name: (forget_sum.double() - remain.sums[name].double()) / forget.count for name, forget_sum in forget.sums.items()}
    remain_means = remain.mean()
    return {name: forget_mean.double() - float(remain_weight) * remain_means[name].double() for name, forget_mean in forget.mean().items()}


def fisher_ratio(forget: FisherSums, remain: FisherSums) -> Score:
    """Weights by how many times more they matter to the forget samples.

    s_j = F̄_f,j / (F̄_r,j + ε),  ε = 1e-8 · mean_k F̄_r,k

    ε follows the scale of the Fisher information: a loss times a constant changes no score, and a weight dead on both sets (0/0) scores
    0. Where the whole of F̄_r is zero, ε is the mean of F̄_f and the ranking that of F̄_f. Every score is finite.

    Paper: the terms (F_f,jj / F_r,jj)² of the bound in the proposition on linear regression (eq. "upperbound").
    Departures: the paper masks by the difference; the ratio is the quantity its bound contains.
    """
    _check_sums("forget", forget)
    _check_sums("remain", remain)
    forget.check_compatible(remain)
    # Sums got by subtraction (all − forget) can be below zero by a rounding error, and a denominator must not.
    forget_means = {name: tensor.double().clamp_min(0) for name, tensor in forget.mean().items()}
    remain_means = {name: tensor.double().clamp_min(0) for name, tensor in remain.mean().items()}
    guard = RATIO_GUARD * _grand_mean(remain_means) or _grand_mean(forget_means) or 1.0
    largest = torch.finfo(torch.float64).max
    return {name: (forget_mean / (remain_means[name] + guard)).clamp_max(largest) for name, forget_mean in forget_means.items()}


def activation_difference(
    forget: Activations, remain: Activations | None = None, average: Literal["samples", "batches"] = "samples"
) -> Score:
    """Channels that the forget samples activate more than the remain samples: one score per channel, by layer.

    s_j = A_f,j − A_r,j, each the mean over its set; without `remain` the forget term alone.

    Paper: section Masking with Activation Values.
    Departures: the released program divides the sums over samples by the number of batches (`average="batches"`), so a smaller last batch
    shifts the balance between the sets.
    """
    check_choice("average", average, ("samples", "batches"))

    def means(argument: str, activations: Activations) -> dict[str, Tensor]:
        size = activations.batches if average == "batches" else int(activations.counts.sum())
        if size < 1:
            raise InputError(argument, "must be activations of at least one sample", size)
        _check_finite(argument, activations.sums)
        return {name: total.sum(0) / size for name, total in activations.sums.items()}

    forget_means = means("forget", forget)
    if remain is None:
        return forget_means
    remain_means = means("remain", remain)
    _check_same_layers(forget, remain)
    return {name: forget_mean - remain_means[name] for name, forget_mean in forget_means.items()}


def tf_idf(forget: Activations, remain: Activations, reading: Literal["text", "released"] = "text") -> Score:
    """Channels (words) by how much they answer to the forgotten classes (documents) and to few others: one score per channel, by layer.

    s_u = IDF[u] · mean over the forgotten c of TF[c, u], TF[c, u] = a[c, u] / Σ_u' a[c, u'] over the channels u' of the layer, with a[c, u]
    the mean activation of channel u over class c, K the number of classes of both sets.
    "text": IDF[u] = log((1 + K) / (1 + #{c' : a[c', u] ≥ mean over the channels of a[c', ·]})), of the classes that have samples.
    "released": IDF[u] = log(K / (1 + #{c' : a[c', u] ≥ mean over the classes of a[·, u]})), a class without samples having a = 0.
    Where a class activates no channel of a layer, TF is 0.

    Paper: section Masking with Activation Values, after Wang et al. 2022 (class-discriminative pruning), who forget one class.
    Departures: "released" is the rule of their program and of the paper's, which prune the lowest scores where the text prunes the highest.
    """
    _check_same_layers(forget, remain)
    present = [activations.counts > 0 for activations in (forget, remain)]
    for argument, rows, activations in zip(("forget", "remain"), present, (forget, remain), strict=True):
        if not rows.any():
            raise InputError(argument, "must be activations of at least one sample", 0)
        _check_finite(argument, activations.sums)
    forget_means, remain_means = forget.mean(), remain.mean()
    forgotten, score = int(present[0].sum()), {}
    absent = sum(int((~rows).sum()) for rows in present) if reading == "released" else 0
    for name in forget.sums:
        activation = torch.cat([forget_means[name][present[0]], remain_means[name][present[1]]])
        activation = torch.cat([activation, activation.new_zeros(absent, activation.shape[1])])
        total = activation.sum(1, keepdim=True)
        frequency = (activation / torch.where(total > 0, total, 1))[:forgotten].mean(0)
        classes, average_over = len(activation), 1 if reading == "text" else 0
        documents = (activation >= activation.mean(average_over, keepdim=True)).sum(0).double()
        score[name] = frequency * torch.log((classes + (reading == "text")) / (1 + documents))
    return score


def random(parameters: nn.Module | Mapping[str, Sequence[int]], seed: int) -> Score:
    """Uniform scores in [0, 1), for a model or a mapping of names to shapes: the control every choice of weights is compared to.

    Each parameter has a generator of its own, seeded by (seed, name): its scores are the same whatever the device, and whichever other
    parameters are asked for. The global generators are left alone; the scores are on the CPU.

    Paper: RandomMask.
    Departures: the released program draws whole output channels and their BatchNorm: `RandomMask.as_released()`.
    """
    check_seed("seed", seed)
    if isinstance(parameters, nn.Module):
        shapes: Mapping[str, Sequence[int]] = {name: parameter.shape for name, parameter in parameters.named_parameters()}
    else:
        shapes = parameters
    return {name: torch.rand(tuple(shape), generator=_generator(int(seed), name), dtype=torch.float64) for name, shape in shapes.items()}


def saliency(gradient: Mapping[str, Tensor]) -> Score:
    """Weights by how fast the loss on the forget samples changes with them.

    s_j = |∂ mean_n ℓ_n / ∂w_j|; the gradient is `curvature.gradient` on the whole forget set.

    Fan et al. 2024, arXiv:2310.12508 (SalUn).
    """
    _check_finite("gradient", gradient)
    return {name: part.detach().double().abs() for name, part in gradient.items()}


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _grand_mean(means: Mapping[str, Tensor]) -> float:
    """The mean over all weights; `fsum`, so that the order of the parameters does not matter."""
    return math.fsum(float(tensor.sum()) for tensor in means.values()) / max(sum(tensor.numel() for tensor in means.values()), 1)


def _check_same_layers(forget: Activations, remain: Activations) -> None:
    channels = [{name: total.shape[1] for name, total in activations.sums.items()} for activations in (forget, remain)]
    if channels[0] != channels[1]:
        raise MismatchError(f"the activations are of different layers: {', '.join(forget.sums)} and {', '.join(remain.sums)}")


def _check_sums(argument: str, sums: FisherSums) -> None:
    from expunge.fisher.sums import FisherSums  # which needs these scores

    if not isinstance(sums, FisherSums):
        raise InputError(argument, "must be FisherSums, as fisher.diagonal gives", type(sums).__name__)
    if sums.count < 1:
        raise InputError(argument, "must be sums over at least one sample", sums.count)
    _check_finite(argument, sums.sums)


def _check_finite(argument: str, parts: Mapping[str, Tensor]) -> None:
    """NaN and infinity have no rank; a ratio would turn some of them into plain zeros."""
    for name, part in parts.items():
        if not torch.isfinite(part).all():
            raise InputError(argument, "must hold finite numbers", f"others in {name}")
