"""What the definition gives on the first two samples, each alone, and how far two sound computations may be apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from expunge.data.batches import take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher.closed_forms.scratch import wide
from expunge.fisher.samples import Squares, add_single, fresh, is_usable, output_error, relative_errors

COUPLED = (
    "the model's output for a sample changes with the rest of its batch, or from call to call, in eval mode, so gradients "
    "of single samples do not exist (batch statistics, functional dropout, or the sample dimension not first)"
)
DROPPED = "squeeze(), say, drops the dimension of a single sample; name another, as in squeeze(1)"
NOT_FINITE = "the model's output is not finite for a sample of the data, so it has no gradient; found NaN or infinity"
NOISE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: below it there is but rounding
PROBE = 2  # samples: passes of one and of two show where the samples are; two gradients separate sums of squares from squares of sums


class Altered(Exception):
    """The model gives other outputs while its operations are watched, as where torch has a fast path of its own."""


def random_like(logits: Tensor) -> Tensor:
    """A random cotangent rather than the loss's own, which vanishes on well-fitted samples."""
    generator = torch.Generator(logits.device).manual_seed(0)  # drawn where it is needed: a copy would wait for the device
    return torch.randn(logits.shape, generator=generator, dtype=torch.float64, device=logits.device).to(logits.dtype)


def defined(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], probe: Batch, together: Tensor, cotangent: Tensor, objective: Objective
) -> tuple[Squares, Tensor]:
    """The probe's squares by the definition and its logits, each sample alone. Checks that samples do not depend on each other."""
    totals, outputs = {name: wide(torch.zeros_like(value)) for name, value in parameters.items()}, []
    for index in range(PROBE):
        one = slice(index, index + 1)
        alone = alone_in(model, probe, index, objective)
        if not is_usable(alone):
            raise ModelError(NOT_FINITE)
        if alone.dim() < together.dim():
            shapes = f"alone it has shape {tuple(alone.shape)}, beside another {tuple(together[one].shape)}"
            raise ModelError(f"the model's output for a sample changes with the rest of its batch: {shapes}; {DROPPED}")
        if not alike(together[one], alone):
            with torch.enable_grad():
                unwatched = objective.logits(model, fresh(probe))[one]
            raise Altered if alike(unwatched, alone) else ModelError(COUPLED)
        add_single(totals, parameters, alone, [cotangent[one]])
        outputs.append(alone.detach())
    return totals, torch.cat(outputs)


def alone_in(model: nn.Module, probe: Batch, index: int, objective: Objective) -> Tensor:
    """The logits of one sample of the probe, which as a whole gives some."""
    try:
        with torch.enable_grad():
            return objective.logits(model, fresh(take(probe, slice(index, index + 1))))
    except InputError as error:
        rule = f"{error.rule}; two samples are taken, but not one alone: {DROPPED}"
        raise InputError(error.argument, rule, error.found) from error.__cause__ or error


def alike(logits: Tensor, reference: Tensor) -> bool:
    return output_error(logits, reference) < tolerance(reference)


def agreeing(squares: Squares, reference: Squares, beside: Mapping[str, str] | None = None) -> set[str]:
    """The names whose squares equal the reference up to rounding.

    Where both are but rounding (the bias of attention's keys) that shows nothing; in float64 it may pass, else with the weight beside.
    """
    shaped = {name: tensor for name, tensor in reference.items() if squares[name].shape == tensor.shape}
    errors = relative_errors([(squares[name], tensor) for name, tensor in shaped.items()])
    found = {name for (name, tensor), error in zip(shaped.items(), errors, strict=True) if error < tolerance(tensor)}
    if len(found) == len(reference):
        return found
    sizes = {
        name: max((float(part.abs().max()) for part in (squares[name], tensor) if part.numel()), default=0.0)
        for name, tensor in shaped.items()
    }
    top = max((float(tensor.max()) for tensor in reference.values() if tensor.numel()), default=0.0)
    for name, tensor in shaped.items():
        faint = sizes[name] <= NOISE.get(tensor.dtype, NOISE[torch.float32]) ** 2 * top
        if faint and (tensor.dtype == torch.float64 or (beside or {}).get(name) in found):
            found.add(name)
    return found


def tolerance(tensor: Tensor) -> float:
    """How far two sound computations may be apart; a wrong layout or a square of sums is off by a good part of the whole."""
    if tensor.dtype == torch.float64:
        return 1e-6
    coarse = tensor.dtype != torch.float32 or torch.is_autocast_enabled(tensor.device.type)
    return 0.15 if coarse else 1e-2
