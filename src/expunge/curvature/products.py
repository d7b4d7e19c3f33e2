"""Multiply vectors by the curvature of the loss, without forming a matrix.

With ℓ_n the loss and J_n the Jacobian of the logits of sample n, the curvature is the mean over samples of

- the Hessian        ∇²ℓ_n, which a network need not have positive
- the Gauss-Newton   J_nᵀ (∂²ℓ_n/∂logits²) J_n, positive for the log-loss, and then the Fisher matrix expected over labels

Vectors name parameters and are float64; products are taken in the model's own type, in eval mode, one batch's graph at a time. A mean
counts samples, not batches, so it does not depend on how the data are cut. On CUDA, batches of the same shapes share one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel

from expunge.curvature.vectors import Parts, Vector, check_vector, inner
from expunge.data.batches import Data, as_batches, batch_size, device_of, first_samples, to_device
from expunge.data.calling import error_summary
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher.borrowing import undisturbed
from expunge.model.checks import check_module
from expunge.runtime.cuda_graphs import GraphedStep
from expunge.runtime.modes import hooked
from expunge.runtime.progress import track


def gradient(model: nn.Module, batches: Data, objective: Objective = Objective(), progress: bool = False) -> tuple[Vector, int]:
    """The mean over samples of ∇ℓ_n for every parameter that requires a gradient, and the number of samples."""
    check_module(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be changed")
    data = as_batches(batches)
    with ready(model, names) as parameters:
        mean = Mean(model, parameters, lambda batch: _gradients(_loss(model, objective, batch), parameters), objective)
        parts = mean(track(iter(data), "gradient", total=data.known, enabled=progress))
    return dict(zip(names, parts, strict=True)), mean.count


def hessian_product(
    model: nn.Module, batches: Data, vector: Mapping[str, Tensor], objective: Objective = Objective(), progress: bool = False
) -> Vector:
    """The mean Hessian of the loss times `vector`, over the parameters it names."""
    check_vector("vector", model, vector)
    data = as_batches(batches)
    with ready(model, list(vector)) as parameters:
        mean = Mean(model, parameters, partial(hessian_times, model, objective, parameters, list(vector.values())), objective)
        parts = mean(track(iter(data), "Hessian product", total=data.known, enabled=progress))
    return dict(zip(vector, parts, strict=True))


def gauss_newton_product(
    model: nn.Module, batches: Data, vector: Mapping[str, Tensor], objective: Objective = Objective(), progress: bool = False
) -> Vector:
    """The mean Gauss-Newton matrix times `vector`, over the parameters it names."""
    check_vector("vector", model, vector)
    data = as_batches(batches)
    with ready(model, list(vector)) as parameters:
        mean = Mean(model, parameters, partial(gauss_newton_times, model, objective, parameters, list(vector.values())), objective)
        parts = mean(track(iter(data), "Gauss-Newton product", total=data.known, enabled=progress))
    return dict(zip(vector, parts, strict=True))


def _loss(model: nn.Module, objective: Objective, batch: Batch) -> Tensor:
    return objective.per_sample(objective.logits(model, batch), objective.targets(batch)).sum()


def hessian_times(model: nn.Module, objective: Objective, parameters: Parts, vector: Parts, batch: Batch) -> Parts:
    """Σ_n ∇²ℓ_n·v = ∇⟨∇ Σ_n ℓ_n, v⟩."""
    slopes = _gradients(_loss(model, objective, batch), parameters, create_graph=True)
    return _gradients(inner(slopes, vector), parameters)


def gauss_newton_times(model: nn.Module, objective: Objective, parameters: Parts, vector: Parts, batch: Batch) -> Parts:
    """Σ_n J_nᵀ H_n J_n·v. J·v = ∂⟨Jᵀu, v⟩/∂u, Jᵀu being linear in u: backward passes alone, on the caller's module itself."""
    logits = objective.logits(model, batch)
    cotangent = torch.zeros_like(logits, requires_grad=True)
    pulled = _gradients(logits, parameters, cotangent, create_graph=True)
    (pushed,) = _gradients(inner(pulled, vector), [cotangent])
    outputs = logits.detach().requires_grad_()
    (slope,) = _gradients(objective.per_sample(outputs, objective.targets(batch)).sum(), [outputs], create_graph=True)
    (curved,) = _gradients(slope, [outputs], pushed)
    return _gradients(logits, parameters, curved)


def _gradients(output: Tensor, inputs: Parts, weights: Tensor | None = None, create_graph: bool = False) -> Parts:
    if not output.requires_grad:  # a constant, such as the slope of a linear loss
        return [torch.zeros_like(part) for part in inputs]
    try:
        return grad(output, inputs, weights, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        rule = "curvature needs a model and a loss that can be differentiated twice"
        raise InputError("objective", rule, error_summary(error)) from error


class Step:
    """A step that is called on every batch. On CUDA it is a CUDA graph, which cannot check labels, so they are checked before."""

    def __init__(self, model: nn.Module, step: Callable[[Batch], None], objective: Objective) -> None:
        self.model, self.objective, self.device = model, objective, device_of(model)
        self.step = GraphedStep(step) if self.device.type == "cuda" and not hooked(model) else step
        self._logits: torch.Size | None = None

    def __call__(self, batch: Batch) -> None:
        batch = to_device(batch, self.device)
        if self.device.type == "cuda":
            if self._logits is None:
                with torch.no_grad():
                    self._logits = self.objective.logits(self.model, first_samples(batch)).shape
            self.objective.check_batch(self._logits, batch)
        self.step(batch)


class Mean:
    """The mean over samples of what `one` sums over a batch, for every parameter. It can be called for any number of passes."""

    def __init__(self, model: nn.Module, parameters: Parts, one: Callable[[Batch], Parts], objective: Objective) -> None:
        self.totals = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
        self.count = 0
        self._add = Step(model, partial(_add_up, self.totals, one), objective)

    def __call__(self, batches: Iterable[Batch]) -> Parts:
        self.count = 0
        for total in self.totals:
            total.zero_()
        for batch in batches:
            self._add(batch)
            self.count += batch_size(batch)
        return [total / self.count for total in self.totals]


def _add_up(totals: Parts, one: Callable[[Batch], Parts], batch: Batch) -> None:
    for total, part in zip(totals, one(batch), strict=True):
        total += part.detach()


@contextmanager
def ready(model: nn.Module, names: Sequence[str]) -> Iterator[Parts]:
    """Put the model in eval mode, gradients on for these parameters alone, attention by formulas that can be differentiated twice."""
    named = dict(model.named_parameters())
    with undisturbed(model, {name: named[name] for name in names}), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield [named[name] for name in names]
