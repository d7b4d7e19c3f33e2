"""Make a pass over a batch by a plan, and keep what it attributes to the drawn samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError
from expunge.fisher import kinds
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.closed_forms.drawn import Drawn, Part, packed, unpacked
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.comparing import Kept
from expunge.fisher.planning.passes import Pass, closed_forms
from expunge.fisher.planning.plan import Plan
from expunge.runtime.nested import tensors

# A batch, its noise, the numbers of the drawn samples, in which part of the parameters they are kept, and in which memory.
Given = tuple[Batch, Tensor, Tensor, int | None, int]
Step = Callable[..., Pass]  # takes these, and now and then an audit


def planned_pass(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    plan: Plan,
    cotangents: kinds.Cotangents,
    objective: Objective,
    scratch: Scratch,
    pick: float,  # in [0, 1): which of the cotangents the drawn samples are kept at; on a GPU by their number, elsewhere by their size
    compared: Collection[int],  # paths of passes before
    given: Given,
    audit: Audit | None = None,
) -> Pass:
    batch, noise, rows, turn, slot = given
    forms = set[Hashable]() if tensors(batch)[0].is_cuda else None
    drawn = Drawn(rows, turn=turn, compared=compared, slot=slot, audit=audit, forms=forms)

    def sent(logits: Tensor) -> Sequence[Tensor]:
        if logits.shape[:1] != (batch_size(batch),):
            raise InputError("objective", f"logits must have one row per sample, {batch_size(batch)}", tuple(logits.shape))
        passes = cotangents(logits.detach(), objective.targets(batch), noise)
        drawn.number = int(pick * len(passes)) if rows.is_cuda else picked(passes, rows, pick)  # a GPU would have to wait
        return passes

    result = closed_forms(model, parameters, plan.layouts, plan.idle, batch, sent, objective, scratch, drawn)
    result.number, result.turn, result.path = drawn.number, drawn.turn, drawn.path
    if rows.is_cuda and result.parts:
        result.packs = packed(result.parts)
    return result


def picked(passes: Sequence[Tensor], rows: Tensor, pick: float) -> int:
    """The number of one of the cotangents, the likelier the larger it is for these samples: an unlikely label's hides what the others
    do."""
    if len(passes) > 1 and len(rows):
        edges = torch.stack([each[rows].double().square().sum() for each in passes]).cumsum(0)
        if 0 < edges[-1] < torch.inf:
            return min(int(torch.searchsorted(edges, pick * edges[-1], right=True)), len(passes) - 1)
    return int(pick * len(passes))


def kept_of(batch: Batch, noise: Tensor, rows: Tensor, result: Pass, others: list[Part], slot: int) -> Kept:
    """What a pass has kept of its drawn samples, in memory of their own: a CUDA graph writes to the same places again."""
    parts = result.parts
    if rows.is_cuda and result.packs is not None:
        parts = unpacked(parts, {kind: pack.clone() for kind, pack in result.packs.items()})
    parts = [*parts, *others]
    logits, cotangents = result.logits[rows], result.cotangents[result.number][rows]
    return Kept(
        batch, rows, take(batch, rows), logits, cotangents, noise[rows], parts, result.passed, slot, result.turn, result.path, result.number
    )
