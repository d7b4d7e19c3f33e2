"""Run one forward pass and its backward passes over a batch, squaring gradients by their closed forms on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size
from expunge.data.objective import Batch, Objective
from expunge.fisher.closed_forms.drawn import Drawn, Part
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.planning.interception import Interception
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.samples import Squares, fresh


@dataclass
class Pass:
    squares: Squares  # in scratch memory: they hold until the next pass
    cotangents: Sequence[Tensor]
    logits: Tensor  # without a graph
    unexpected: set[str]  # used in a way the layouts do not know: the pass does not count
    reads: bool  # the model took numbers out of tensors
    parts: list[Part]  # of the drawn samples
    passed: set[str]  # parameters that were used, but not kept
    asks: bool = False  # the model asked tensors for a yes or no
    number: int = 0  # of the cotangents at which these were kept
    turn: int | None = None  # which of the uses of parameters were kept
    path: int = 0  # what the operations were
    wrong: set[str] = field(default_factory=set)  # parameters whose squares fail their audit
    silent: bool = False  # all parameters were audited, and none has a gradient: nothing was shown
    forms: Collection[Hashable] = ()  # of the operations whose squares an audit computes again
    packs: dict[torch.dtype, Tensor] | None = None  # on CUDA, the rows of the parts


def closed_forms(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    idle: Collection[str],
    batch: Batch,
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    objective: Objective,
    scratch: Scratch,
    drawn: Drawn | None = None,
) -> Pass:
    """Squares of the parameters that have a layout. Their weight gradients are never formed: a `.grad` that appears all the same
    belongs to a parameter that was used outside the closed forms, or to an `idle` one that was used at all. Others get no gradient."""
    observed = [*layouts, *idle]
    names = {id(parameters[name]): name for name in observed}
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items() if observed else ():  # without one the model runs as it is
            parameter.requires_grad_(name in layouts or name in idle)
        scratch.begin(0 if drawn is None else drawn.slot)
        followed = any(layout.derived for layout in layouts.values())
        own = [*model.parameters(), *model.buffers()] if followed else []  # to list them takes a while
        interception = Interception(names, layouts, batch_size(batch), scratch, drawn=drawn, constants=own)
        with torch.enable_grad(), interception if observed else nullcontext():
            logits = objective.logits(model, fresh(batch))
        if drawn is not None:
            drawn.follow(interception.path)
        sent, outputs = cotangents(logits), logits.detach()
        if interception.outside:  # their layouts do not hold here, and need not let a backward pass through
            return Pass({}, sent, outputs, interception.outside, interception.reads, [], set())
        wanted = [parameters[name] for name in observed]  # nothing else of the model's or the caller's gets a gradient
        if len(sent) > 1:
            scratch.early = None  # no total is complete before the last of the backward passes
        for number, cotangent in enumerate(sent):
            if logits.requires_grad and wanted:
                if drawn is not None:
                    drawn.open = number == drawn.number
                logits.backward(cotangent.to(logits.dtype), retain_graph=number + 1 < len(sent), inputs=wanted)
            interception.settle(parameters)
            if drawn is not None and drawn.audit is not None:
                drawn.audit.settle()
        unexpected = {name for name in observed if parameters[name].grad is not None}
        kept = ([], set()) if drawn is None else (drawn.parts, drawn.passed)
        wrong, silent = set[str](), False
        if drawn is not None and drawn.audit is not None and not unexpected:
            wrong, silent = drawn.audit.wrong(interception.squares), drawn.audit.name is None and drawn.audit.silent
        forms = () if drawn is None or drawn.forms is None else drawn.forms
        squares, reads, asks = interception.squares, interception.reads, interception.asks
        return Pass(squares, sent, outputs, unexpected, reads, *kept, asks=asks, wrong=wrong, silent=silent, forms=forms)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.requires_grad_(flags[name])
