"""Keep what the closed forms attribute to a few samples of a batch, so that a plain pass over these samples can confirm it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from expunge.fisher.closed_forms.audit import Audit

TURNS = 3
Gradients = Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]  # of a weight and a bias, from inputs and slopes


class Part(NamedTuple):
    """One use of parameters: the rows of its input and of its output's gradient that are taken for the drawn samples'."""

    weight: str | None
    bias: str | None
    gradients: Gradients
    inputs: Tensor  # (drawn samples, frames, ...); the slopes themselves where they are the gradient already
    slopes: Tensor


@dataclass
class Drawn:
    """The samples to keep, by their numbers in the batch, and what was kept of them in the backward pass `number`.

    `turn`: of the uses of parameters only every `TURNS`th is kept, from this one on; of the others the names. None: all are kept. So are
    they where the pass has another `path` (of operations and shapes) than those `compared` before: a model may choose its way by a mask.
    """

    rows: Tensor
    number: int = 0
    turn: int | None = None
    compared: Collection[int] | None = None
    path: int = 0
    slot: int = 0  # each has memory of its own
    open: bool = False  # during that backward pass
    parts: list[Part] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    uses: int = 0
    audit: Audit | None = None
    forms: set[Hashable] | None = None  # of the operations whose squares an audit would compute again; None: nobody asks

    def follow(self, path: int) -> None:
        """The forward pass has ended, on this path."""
        self.path = path
        if self.compared is not None and path not in self.compared:
            self.turn = None

    def takes(self, *names: str | None) -> bool:
        """Whether this use, of these parameters, is to be kept."""
        if not self.open or not self.rows.shape[0]:
            return False
        self.uses += 1
        if self.turn is None or self.uses % TURNS == self.turn:
            return True
        self.passed.update(name for name in names if name is not None)
        return False


def gradients_of(parts: list[list[Part]], weights: Tensor) -> dict[str, Tensor]:
    """Σ_s weight_s · gradient_s over the drawn samples of several passes of the same form, in float32 or wider."""
    sums: dict[str, Tensor] = {}
    for part in joined(parts):
        inputs, slopes = _wide(part.inputs), _wide(part.slopes)
        slopes = slopes * weights.to(slopes).view(-1, *(1,) * (slopes.dim() - 1))
        for name, gradient in zip((part.weight, part.bias), part.gradients(inputs, slopes), strict=True):
            if name is not None and gradient is not None:
                sums[name] = sums[name] + gradient if name in sums else gradient
    return sums


def joined(passes: list[list[Part]]) -> list[Part]:
    """The rows of several passes of the same form end to end; on a GPU all parts of a pass at once, since each `cat` is a slow launch."""
    if len(passes) < 2:
        return [part for parts in passes for part in parts]
    if passes[0] and passes[0][0].slopes.is_cuda and len({_pattern(parts) for parts in passes}) == 1:
        return in_packs(passes)
    return [
        uses[0]._replace(inputs=torch.cat([use.inputs for use in uses]), slopes=torch.cat([use.slopes for use in uses]))
        for uses in zip(*passes, strict=True)
    ]


def in_packs(passes: list[list[Part]]) -> list[Part]:
    """The same of passes of one pattern, by a `cat` for each pass and one for all."""
    packs = [packed(parts) for parts in passes]
    whole = {kind: torch.stack([pack[kind] for pack in packs]) for kind in packs[0]}
    return unpacked(passes[0], whole)


def packed(parts: list[Part]) -> dict[torch.dtype, Tensor]:
    """The rows of all parts end to end, a tensor for each type: copied at once where a CUDA graph would write over them."""
    rows = _unique(parts)
    kinds = dict.fromkeys(tensor.dtype for tensor in rows)
    return {kind: torch.cat([tensor.reshape(-1) for tensor in rows if tensor.dtype == kind]) for kind in kinds}


def unpacked(parts: list[Part], packs: Mapping[torch.dtype, Tensor]) -> list[Part]:
    """The same parts, in the memory of the packs; of several passes where these are (passes, ...)."""
    rows = _unique(parts)
    places: dict[int, Tensor] = {}
    for kind, pack in packs.items():
        own = [tensor for tensor in rows if tensor.dtype == kind]
        for tensor, place in zip(own, pack.split([tensor.numel() for tensor in own], dim=-1), strict=True):
            places[id(tensor)] = place.reshape(math.prod(place.shape[:-1]) * len(tensor), *tensor.shape[1:])
    return [part._replace(inputs=places[id(part.inputs)], slopes=places[id(part.slopes)]) for part in parts]


def _unique(parts: list[Part]) -> list[Tensor]:
    return list({id(tensor): tensor for part in parts for tensor in (part.inputs, part.slopes)}.values())


def _pattern(parts: list[Part]) -> tuple[object, ...]:
    """The shapes and types of the rows, and which of them are one tensor."""
    rows = [tensor for part in parts for tensor in (part.inputs, part.slopes)]
    place = {id(tensor): number for number, tensor in reversed(list(enumerate(rows)))}
    return tuple((tensor.shape, tensor.dtype, place[id(tensor)]) for tensor in rows)


def same_form(first: list[Part], second: list[Part]) -> bool:
    """Whether the parts of two passes are of the same parameters and shapes, so that they can be joined."""
    return [_form(part) for part in first] == [_form(part) for part in second]


def _form(part: Part) -> tuple[object, ...]:
    return part.weight, part.bias, part.inputs.shape[1:], part.slopes.shape[1:], part.slopes.dtype


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
