"""Run one forward pass and its backward passes over a batch, squaring gradients by their closed forms on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size
from expunge.data.objective import Batch, Objective
from expunge.fisher.closed_forms.rules import settle
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.planning.interception import Interception
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.samples import Squares, fresh


@dataclass
class Pass:
    squares: Squares  # in scratch memory: they hold until the next pass
    cotangents: Sequence[Tensor]
    logits: torch.Size
    unexpected: set[str]  # used in a way the layouts do not know: the pass does not count


def closed_forms(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    idle: Iterable[str],
    batch: Batch,
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    objective: Objective,
    scratch: Scratch,
) -> Pass:
    """Squares of the parameters that have a layout. Their weight gradients are never formed: a `.grad` that appears all the same
    belongs to a parameter that was used outside the closed forms. A use of an `idle` one is unexpected; others get no gradient."""
    names = {id(parameters[name]): name for name in (*layouts, *idle)}
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in layouts)
        scratch.begin()
        interception = Interception(names, layouts, batch_size(batch), scratch)
        with torch.enable_grad(), interception:
            logits = objective.logits(model, fresh(batch))
        sent = cotangents(logits)
        if interception.outside:  # their layouts do not hold here, and need not let a backward pass through
            return Pass({}, sent, logits.shape, interception.outside)
        wanted = [parameters[name] for name in layouts]  # nothing else of the model's or the caller's gets a gradient
        for number, cotangent in enumerate(sent):
            if logits.requires_grad:
                logits.backward(cotangent.to(logits.dtype), retain_graph=number + 1 < len(sent), inputs=wanted)
            settle(interception.squares, interception.vectors)
        unexpected = {name for name in layouts if parameters[name].grad is not None}
        return Pass(interception.squares, sent, logits.shape, unexpected)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.requires_grad_(flags[name])
