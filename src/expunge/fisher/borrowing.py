"""Borrow a model for Fisher passes: its parameters checked and chosen, everything given back as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from expunge.data.batches import device_of
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher.kinds import NO_GRADIENT
from expunge.fisher.samples import fresh
from expunge.model.checks import check_model, check_module, check_names, check_unsharded
from expunge.runtime.modes import in_mode, safe_norms, seeded, unchanged


@contextmanager
def undisturbed(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Put the model in eval mode, with gradients for these parameters alone. Afterwards everything is as it was, also after an error."""
    states = [(value, value.requires_grad, value.grad) for value in model.parameters()]
    chosen = {id(value) for value in parameters.values()}
    with (
        torch.inference_mode(False),
        _uncompiled(),
        seeded(0, device_of(model)),
        in_mode(model, training=False),
        unchanged(model),
        safe_norms(model),
    ):
        try:
            for value, _, _ in states:
                value.grad = None
                value.requires_grad_(id(value) in chosen)
            yield
        finally:
            for value, flag, gradient in states:
                value.requires_grad_(flag)
                value.grad = gradient


def check_differentiable(model: nn.Module, totals: Mapping[str, Tensor], sample: Batch, objective: Objective) -> None:
    """Where all totals are zero, raise ModelError if the output for a sample has a gradient by no parameter of the model at all."""
    if any(bool(total.any()) for total in totals.values()):
        return
    flags = [(value, value.requires_grad) for value in model.parameters() if value.is_floating_point()]
    try:
        for value, _ in flags:
            value.requires_grad_(True)
        with torch.enable_grad():
            logits = objective.logits(model, fresh(sample))
    finally:
        for value, flag in flags:
            value.requires_grad_(flag)
    if flags and not logits.requires_grad:
        raise ModelError(NO_GRADIENT)


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models as they are written: a compiler would trace the closed forms too. Without one there is nothing to import."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def wanted_parameters(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters of these names, checked; None: all that require a gradient."""
    check_module(model)
    check_unsharded(model, "use fisher.sharded_diagonal")
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    strange = [name for name, value in (named | buffers).items() if value.is_inference() or (name in named and value.is_complex())]
    if strange:
        raise ModelError(f"parameters must be real, and not made under torch.inference_mode; found {strange[0]}")
    check_model(model)
    if names is None:
        chosen = {name: value for name, value in named.items() if value.requires_grad}
    else:
        asked = check_names("parameters", names)
        if unknown := [name for name in asked if name not in named]:
            raise InputError("parameters", "must be names of the model's parameters", unknown[:4])
        chosen = {name: named[name] for name in asked}
    if not chosen:
        raise ModelError("the model has no parameters to take the Fisher information of (all frozen, or none at all)")
    return chosen
