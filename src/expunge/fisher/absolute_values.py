"""Add up the absolute values of per-sample gradients: an importance in which no single sample counts by its square."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, as_batches, batch_size, device_of, to_device
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import kinds
from expunge.fisher.engine import undisturbed
from expunge.fisher.naming import objective_name
from expunge.fisher.planning.survey import Plan, survey_without_closed_forms
from expunge.fisher.samples import Squares, batched, fresh, looped
from expunge.fisher.sums import FisherSums
from expunge.runtime.progress import track
from expunge.storage.tensors import weights_digest


def absolute(model: nn.Module, batches: Data, objective: Objective = Objective(), progress: bool = False) -> FisherSums:
    """Σ_n |∂ℓ_n/∂w| for every parameter that requires a gradient, and the number of samples; one gradient per sample, in eval mode.

    Apart from rounding, the result does not depend on the batch size or on the order. An absolute value of a sum over positions has no
    closed form, so gradients of single samples are formed, by torch.func where it gives what a loop gives, else in a loop: on a CPU this
    takes several times as long as `fisher.diagonal`. The model, its modes, flags and gradients are left as they were.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be changed")
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    data, device, count, plan = as_batches(batches), device_of(model), 0, None
    digest = weights_digest(model)
    with undisturbed(model, parameters):
        for batch in track(iter(data), "absolute gradients", total=data.known, enabled=progress):
            batch = to_device(batch, device)
            if plan is None and batch_size(batch) > 1:
                plan = survey_without_closed_forms(model, parameters, batch, objective)
            for name, total in _sizes(model, plan or Plan(looped=list(parameters)), batch, objective).items():
                sums[name].add_(total)
            count += batch_size(batch)
    for name, total in sums.items():
        if not torch.isfinite(total).all():
            raise ModelError(f"the gradients of {name} must be finite; found NaN or infinity")
    return FisherSums(sums, count, "absolute", digest, objective_name(objective, "absolute"))


def _sizes(model: nn.Module, plan: Plan, batch: Batch, objective: Objective) -> Squares:
    """Σ_n |∂ℓ_n/∂w| over a batch."""
    with torch.no_grad():
        logits: Tensor = objective.logits(model, fresh(batch))
    if logits.shape[:1] != (batch_size(batch),):
        raise InputError("objective", f"logits must have one row per sample, {batch_size(batch)}", tuple(logits.shape))
    cotangents = kinds.empirical(objective)(logits, objective.targets(batch), logits)
    sizes: Squares = {}
    for way, names in ((batched, plan.batched), (looped, plan.looped)):
        if names:
            sizes |= way(model, names, batch, cotangents, objective, torch.abs)
    return sizes
