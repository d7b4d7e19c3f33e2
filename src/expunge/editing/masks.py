"""Turn a score into a mask: choose which weights are masked, in which units, and how many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from expunge.editing import sharded_masks
from expunge.errors import InputError, ModelError
from expunge.storage.sharded import is_sharded
from expunge.validate import check_choice, check_number

Mask = dict[str, Tensor]  # parameter name -> bool tensor of the parameter's shape, True where masked
Granularity = Literal["element", "kernel", "channel"]
Scope = Literal["global", "layer"]
Which = Literal["weights", "all"]
Rounding = Literal["nearest", "down"]


def candidates(model: nn.Module, head: Sequence[str] = (), include_head: bool = False, which: Which = "weights") -> tuple[str, ...]:
    """The names of the parameters that may be masked, in the model's order.

    "weights" are those of two dimensions or more, "all" adds biases and norms. Shared parameters come once, under their first
    name; frozen ones (`requires_grad=False`) are left out.

    Paper: "we do not mask parameters in the final classifier".
    Departures: the released program has the classifier among the candidates, `include_head=True`, and never biases or BatchNorm.
    """
    check_choice("which", which, Which)
    named = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name in head if name not in named]
    if unknown:
        raise InputError("head", "must name parameters of the model", unknown)
    # By identity: a head tied to an embedding may be asked for under either name.
    head_parameters = set() if include_head else {named[name] for name in head}
    maskable, excluded = [], []
    for name, parameter in model.named_parameters():
        if parameter in head_parameters:
            excluded.append(f"{name} (head)")
        elif not parameter.requires_grad:
            excluded.append(f"{name} (frozen)")
        elif which == "weights" and parameter.dim() < 2:
            excluded.append(f"{name} ({parameter.dim()}-D)")
        else:
            maskable.append(name)
    if not maskable:
        raise ModelError(f"no parameter is left to mask; left out: {', '.join(excluded) or 'none, the model has no parameters'}")
    return tuple(maskable)


def select(
    score: Mapping[str, Tensor],
    ratio: float,
    granularity: Granularity = "element",
    scope: Scope = "global",
    candidates: Sequence[str] | None = None,
    rounding: Rounding = "nearest",
) -> Mask:
    """The top `ratio` of the units, by score.

    |M| = ⌊ratio · units + ½⌋ ("down": ⌊ratio · units⌋), over all candidates ("global") or in each parameter ("layer"). A unit is a single
    weight ("element"), a convolution's (out, in) kernel ("kernel"; single weights of matrices and vectors) or an output channel or row
    ("channel"); its score is the mean over its weights.

    Exactly that many units, the same ones on any device: of equal scores those of earlier candidates, then of lower index, come first.
    So masks of the same score are nested as the ratio grows. Without `candidates` all of the score counts, in its order. A score whose
    tensors are sharded (FSDP2) gives the same mask, sharded likewise; all processes must call it.

    Paper: "select top R parameters according to F_f,jj − F_r,jj".
    Departures: the released program masks kernels of convolutions and single weights of linear layers, `granularity="kernel"`, and
    ⌊ratio · units⌋ of them, `rounding="down"`.
    """
    if not isinstance(score, Mapping):
        rule = "must be a tensor for each parameter by name, as scores.fisher_difference(forget_sums, remain_sums) gives"
        raise InputError("score", rule, type(score).__name__)

    def checked() -> list[str]:
        check_choice("granularity", granularity, Granularity)
        check_choice("scope", scope, Scope)
        check_choice("rounding", rounding, Rounding)
        check_number("ratio", ratio, 0, 1)
        names = list(score if candidates is None else candidates)
        unknown = [name for name in names if name not in score]
        if unknown or len(set(names)) != len(names) or not names:
            raise InputError("candidates", "must be names in the score, at least one, each once", unknown or names)
        if sharded and granularity != "element":
            raise InputError("granularity", "must be 'element' for sharded scores", granularity)
        return names

    if sharded := any(is_sharded(value) for value in score.values()):
        return sharded_masks.top(score, checked, partial(number_of_units, ratio=ratio, rounding=rounding), scope == "layer")
    names = checked()
    units = {name: _unit_scores(score[name], granularity) for name in names}
    for name, values in units.items():
        if values.isnan().any():
            raise InputError("score", "must not be NaN, nor hold +inf and -inf in one unit", name)
    if scope == "layer":
        chosen = [_top(values, ratio, rounding) for values in units.values()]
    else:
        device = units[names[0]].device
        together = torch.cat([values.to(device) for values in units.values()])
        chosen = list(_top(together, ratio, rounding).split([values.numel() for values in units.values()]))
    return {name: _spread(part.to(score[name].device), score[name].shape, granularity) for name, part in zip(names, chosen, strict=True)}


def below_threshold(score: Mapping[str, Tensor], ratio: float, scope: Scope = "global") -> Mask:
    """The lowest scores, as the programs of TF-IDF choose them: those at or below the ⌊n · (1 − ratio)⌋-th largest of n.

    These are ⌈n · ratio⌉ + 1, and more where several scores equal the threshold; none at a ratio of 0.
    """

    def chosen(values: Tensor) -> Tensor:
        if ratio == 0:
            return torch.zeros_like(values, dtype=torch.bool)
        kept = max(1, int(values.numel() * (1 - ratio)))
        return values <= torch.topk(values, kept, sorted=False).values.amin()

    if scope == "layer":
        return {name: chosen(values) for name, values in score.items()}
    together = torch.cat([values.flatten() for values in score.values()])
    parts = chosen(together).split([values.numel() for values in score.values()])
    return {name: part.reshape(score[name].shape) for name, part in zip(score, parts, strict=True)}


def count(mask: Mapping[str, Tensor]) -> int:
    """How many weights are masked."""
    return sum(int(part.sum()) for part in mask.values())


def masked_share(mask: Mapping[str, Tensor]) -> dict[str, float]:
    """The masked part of each parameter, between 0 and 1."""
    return {name: int(part.sum()) / max(part.numel(), 1) for name, part in mask.items()}


def masked_parameters(model: nn.Module, mask: Mapping[str, Tensor]) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Each parameter of a mask beside its part, on the parameter's device, checked to belong together."""
    if not isinstance(mask, Mapping):
        raise InputError("mask", "must be a boolean tensor for each parameter by name, as masks.select gives", type(mask).__name__)
    named = dict(model.named_parameters(remove_duplicate=False))
    pairs: dict[str, tuple[nn.Parameter, Tensor]] = {}
    for name, part in mask.items():
        if name not in named:
            raise InputError("mask", "must name parameters of the model", name)
        if part.dtype != torch.bool or part.shape != named[name].shape:
            rule = f"{name} must be torch.bool of shape {tuple(named[name].shape)}"
            raise InputError("mask", rule, f"{part.dtype} of shape {tuple(part.shape)}")
        pairs[name] = (named[name], part.to(named[name].device))
    if len({parameter for parameter, _ in pairs.values()}) != len(pairs):
        raise InputError("mask", "must name a shared parameter once", list(mask))
    return pairs


def _unit_scores(score: Tensor, granularity: Granularity) -> Tensor:
    """One float64 score per unit, in the order of the weights."""
    values = score.detach().double()
    first = {"element": values.dim(), "kernel": 2, "channel": 1}[granularity]
    if values.dim() <= first or values.numel() == 0:
        return values.reshape(-1)
    values = values.flatten(first).reshape(-1, values[(0,) * first].numel())
    size = values.shape[1]
    # Summed by halves, in one order: a reduction's order, and so its last bit and the ranking, would differ between devices.
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = torch.cat([values[:, :half] + values[:, half : 2 * half], values[:, 2 * half :]], dim=1)
    return values.squeeze(1) / size


def number_of_units(units: int, ratio: float, rounding: Rounding) -> int:
    return math.floor(ratio * units + (0.5 if rounding == "nearest" else 0.0))


def _top(values: Tensor, ratio: float, rounding: Rounding) -> Tensor:
    """True for the ⌊ratio · n + ½⌋ (or ⌊ratio · n⌋) largest, of equal ones the first."""
    wanted = number_of_units(values.numel(), ratio, rounding)
    if wanted == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    threshold = torch.topk(values, wanted, sorted=False).values.amin()
    above, equal = values > threshold, values == threshold
    return above | (equal & (equal.cumsum(0) <= wanted - above.sum()))


def _spread(chosen: Tensor, shape: torch.Size, granularity: Granularity) -> Tensor:
    """Chosen units as a mask of the parameter's shape."""
    first = {"element": len(shape), "kernel": 2, "channel": 1}[granularity]
    if len(shape) <= first or math.prod(shape) == 0:
        return chosen.reshape(shape)
    return chosen.reshape(*shape[:first], *(1,) * (len(shape) - first)).expand(shape).contiguous()
