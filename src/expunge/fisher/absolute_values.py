"""Add up the absolute values of per-sample gradients: an importance in which no single sample counts by its square."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from expunge.data.batches import Data, as_batches, batch_size, device_of, take
from expunge.data.calling import out_of_memory
from expunge.data.objective import Batch, Objective, check_objective
from expunge.errors import InputError, ModelError
from expunge.fisher import adders, kinds
from expunge.fisher.borrowing import check_differentiable, undisturbed, wanted_parameters
from expunge.fisher.closed_forms.drawn import Drawn
from expunge.fisher.company import Alone
from expunge.fisher.comparing import Kept
from expunge.fisher.confirming import Confirmation, Revised
from expunge.fisher.fitting import Fitting
from expunge.fisher.naming import objective_name
from expunge.fisher.planning.plan import Plan
from expunge.fisher.planning.survey import survey_without_closed_forms
from expunge.fisher.reading import checked
from expunge.fisher.samples import Squares, batched, looped
from expunge.fisher.showing import samples_with_gradient
from expunge.fisher.steadiness import Steadiness
from expunge.fisher.sums import FisherSums
from expunge.model.checks import check_module
from expunge.model.copying import unwrapped
from expunge.runtime.progress import track
from expunge.storage.tensors import weights_digest


def absolute(model: nn.Module, batches: Data, objective: Objective = Objective(), progress: bool = False) -> FisherSums:
    """Σ_n |∂ℓ_n/∂w| for every parameter that requires a gradient, and the number of samples; one gradient per sample, in eval mode.

    Apart from rounding, the result does not depend on the batch size or on the order. An absolute value of a sum over positions has no
    closed form, so gradients of single samples are formed, by torch.func where it gives what a loop gives, else in a loop: on a CPU this
    takes several times as long as `fisher.diagonal`. The model, its modes, flags and gradients are left as they were.
    """
    check_objective(objective)
    check_module(model)
    model = unwrapped(model)
    if not any(value.requires_grad for value in model.parameters()):
        raise ModelError("model: has no parameter that requires a gradient, nothing can be changed")
    parameters = wanted_parameters(model, None)
    data, device, digest, sample = as_batches(batches), device_of(model), weights_digest(model), None
    with undisturbed(model, parameters):
        adder = _Adder(model, parameters, objective)
        while True:
            try:
                for batch, _ in track(checked(iter(data), device, objective), "absolute gradients", total=data.known, enabled=progress):
                    sample = take(batch, slice(0, 1)) if sample is None else sample
                    adder.add(batch)
                adder.finish()
                break
            except Revised as error:
                adder.restart(error.names)
        check_differentiable(model, adder.sums, sample, objective)
    for name, total in adder.sums.items():
        if not torch.isfinite(total).all():
            raise ModelError(f"the gradients of {name} must be finite; found NaN or infinity")
    return FisherSums(adder.sums, adder.count, "absolute", digest, objective_name(objective, "absolute"))


class _Adder:
    """Adds up batches; samples drawn from each are compared with plain passes, as in `fisher.diagonal`."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self.sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
        self.count, self.plan = 0, Plan(looped=list(parameters))
        self.surveyed = False
        self.fitting = Fitting()
        self.confirms = device_of(model).type in adders.CONFIRMED_ON
        self.confirmation = Confirmation(model, parameters, objective, kinds.empirical(objective), seed=0)
        self.steadiness = Steadiness(model, parameters, objective)

    def add(self, batch: Batch) -> None:
        samples = batch_size(batch)
        self.fitting.add(slice(0, samples), lambda rows: self.add_part(take(batch, rows)), lambda: None)

    def add_part(self, batch: Batch) -> None:
        samples = batch_size(batch)
        if samples > 1 and not self.surveyed:
            self.plan, self.surveyed = survey_without_closed_forms(self.model, self.parameters, batch, self.objective), True
        sizes = self.sizes(batch, self.confirmation.draw(samples) if self.confirms and samples > 1 else [])
        untold = [name for name in self.plan.batched if name not in self.confirmation.confirmed and bool(sizes[name].any())]
        if untold and self.confirms:  # no sample that was drawn so far has a gradient of these
            having = samples_with_gradient(self.model, self.parameters, untold, batch, self.objective)
            if unfounded := set(untold).difference(*having.values()):
                raise Revised(unfounded)
            self.confirmation.settle(self.plan)
            for index in having:
                self.sizes(batch, [index])
                self.confirmation.settle(self.plan)
        for name, total in sizes.items():
            self.sums[name].add_(total)
        self.count += samples

    def finish(self) -> None:
        self.confirmation.settle(self.plan)

    def restart(self, names: set[str]) -> None:
        """The named parameters go one sample at a time."""
        self.plan.revise(names)
        self.count = 0
        self.confirmation.begin()
        for total in self.sums.values():
            total.zero_()

    def sizes(self, batch: Batch, drawn: list[int]) -> Squares:
        """Σ_n |∂ℓ_n/∂w| over a batch; the drawn samples are passed on to be compared."""
        before = self.steadiness.now()
        logits = self.confirmation.logits_of(batch)
        if logits.shape[:1] != (batch_size(batch),):
            raise InputError("objective", f"logits must have one row per sample, {batch_size(batch)}", tuple(logits.shape))
        if self.confirms:
            self.steadiness.check(batch, before)
        cotangents = self.confirmation.cotangents(logits, self.objective.targets(batch), logits)
        if not self.count:  # now that labels are known to be inside the head
            kinds.check_losses_apart(self.parameters, logits, batch, self.objective)
        kept = Drawn(torch.tensor(drawn, dtype=torch.int64, device=logits.device))
        sizes, alone = Squares(), Alone(logits)
        if self.plan.batched:
            given = batch, cotangents, self.objective, torch.abs, kept if drawn else None, alone.note
            try:
                sizes |= batched(self.model, self.plan.batched, *given)
            except Exception as error:  # what vmap cannot express for these data
                if out_of_memory(error):
                    raise
                self.plan.revise(set(self.plan.batched))
        if self.plan.looped:
            sizes |= looped(self.model, self.plan.looped, batch, cotangents, self.objective, torch.abs, alone.note)
        if self.confirms:
            self.confirmation.against(alone, batch, self.plan)
        if drawn:
            rows = kept.rows
            noise = logits.new_empty(len(rows), 0)  # such losses take none
            parts = Kept(batch, rows, take(batch, rows), logits[rows], cotangents[0][rows], noise, kept.parts, set())
            self.confirmation.add(parts, self.plan, batch_size(batch))
        return sizes
