"""Products with the curvature of the loss, and steps solved from them: no matrix is ever formed.

With ℓ_n the loss and J_n the Jacobian of the logits of sample n, the curvature is the mean over samples of

- the Hessian        ∇²ℓ_n, which a network need not have positive
- the Gauss-Newton   J_nᵀ (∂²ℓ_n/∂logits²) J_n, positive for the log-loss, and then the Fisher matrix expected over labels

Vectors name parameters and are float64; products are taken in the model's own type, in eval mode, one batch's graph at a time. A mean
counts samples, not batches, so it does not depend on how the data are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel

from expunge.batches import Batches, batch_size, device_of, to_device
from expunge.errors import DivergedError, InputError, ModelError
from expunge.fisher.engine import undisturbed
from expunge.objective import Batch, Objective
from expunge.progress import track

Vector = dict[str, Tensor]  # parameter name -> float64 tensor of the parameter's shape
Parts = Sequence[Tensor]  # of a vector, in the order of its names

ROOM = 10.0  # how far LiSSA may pass the bound of a positive curvature before it counts as diverged: a network's dips below zero


def gradient(model: nn.Module, batches: Batches, objective: Objective = Objective(), progress: bool = False) -> tuple[Vector, int]:
    """The mean over samples of ∇ℓ_n for every parameter that requires a gradient, and the number of samples."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be changed")

    def one(parameters: Parts, batch: Batch) -> Parts:
        return _gradients(_loss(model, batch, objective), parameters)

    return _mean(model, names, batches, one, "gradient", progress)


def hessian_product(
    model: nn.Module, batches: Batches, vector: Mapping[str, Tensor], objective: Objective = Objective(), progress: bool = False
) -> Vector:
    """The mean Hessian of the loss times `vector`, over the parameters it names."""

    def one(parameters: Parts, batch: Batch) -> Parts:
        return _hessian_times(model, parameters, list(vector.values()), batch, objective)

    return _mean(model, list(vector), batches, one, "Hessian product", progress)[0]


def gauss_newton_product(
    model: nn.Module, batches: Batches, vector: Mapping[str, Tensor], objective: Objective = Objective(), progress: bool = False
) -> Vector:
    """The mean Gauss-Newton matrix times `vector`, over the parameters it names."""

    def one(parameters: Parts, batch: Batch) -> Parts:
        return _gauss_newton_times(model, parameters, list(vector.values()), batch, objective)

    return _mean(model, list(vector), batches, one, "Gauss-Newton product", progress)[0]


@dataclass(frozen=True)
class ConjugateGradients:
    """(G + damping·I)⁻¹ v, G the mean Gauss-Newton matrix, by conjugate gradients: a pass over the data an iteration.

    Ends when the residual is `tolerance` of ‖v‖ or after `iterations`, with what it has by then.
    """

    damping: float = 0.01
    iterations: int = 50
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        _check("damping", "must be a positive number", self.damping, 0 < self.damping < math.inf)
        _check("iterations", "must be at least 1", self.iterations, self.iterations >= 1)
        _check("tolerance", "must be at least 0", self.tolerance, self.tolerance >= 0)

    def __call__(
        self, model: nn.Module, batches: Batches, target: Vector, objective: Objective = Objective(), progress: bool = False
    ) -> Vector:
        solution = {name: torch.zeros_like(part) for name, part in target.items()}
        residual = {name: part.clone() for name, part in target.items()}
        direction = residual
        size = first = _dot(residual, residual)
        with closing(track(range(1, self.iterations + 1), "conjugate gradients", enabled=progress)) as iterations:
            for iteration in iterations:
                if size <= self.tolerance**2 * first < math.inf:
                    break
                product = _plus(gauss_newton_product(model, batches, direction, objective), self.damping, direction)
                along = _dot(direction, product)
                if not math.isfinite(along):
                    raise DivergedError(f"conjugate gradients, iteration {iteration}: the gradient or the curvature is not finite")
                if along <= 0:
                    advice = f"a loss that is not convex in the logits needs more damping (now {self.damping:g})"
                    raise DivergedError(f"conjugate gradients, iteration {iteration}: the curvature is not positive; {advice}")
                solution = _plus(solution, size / along, direction)
                residual = _plus(residual, -size / along, product)
                before, size = size, _dot(residual, residual)
                direction = _plus(residual, size / before, direction)
        return solution


@dataclass(frozen=True)
class LiSSA:
    """(H + damping·scale·I)⁻¹ v, H the mean Hessian, by the Neumann series, each term from the next batch.

    d ← v + (1 − damping)·d − H_b·d / scale over the batches b of `passes` shuffled passes, from d = v; the result is d / scale. A batch's
    H_b counts by its size, so that the mean over a pass is H. It converges where every batch's Hessian has its eigenvalues
    between −damping·scale and 2·scale, and raises `DivergedError` where it does not.
    """

    damping: float = 0.01
    scale: float = 20.0
    passes: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        _check("damping", "must be in [0, 1)", self.damping, 0 <= self.damping < 1)
        _check("scale", "must be a positive number", self.scale, 0 < self.scale < math.inf)
        _check("passes", "must be at least 1", self.passes, self.passes >= 1)

    def __call__(
        self, model: nn.Module, batches: Batches, target: Vector, objective: Objective = Objective(), progress: bool = False
    ) -> Vector:
        names, device = list(target), device_of(model)
        usual_size = sum(batch_size(batch) for batch in batches) / len(batches)
        start = list(target.values())
        limit, size = ROOM * _norm(start), 1.0
        found, step = start, 0
        first_bad = torch.zeros((), dtype=torch.int64, device=device)
        with _ready(model, names) as parameters, closing(track(range(self.passes), "LiSSA", enabled=progress)) as passes:
            for number in passes:
                for batch in batches.shuffled(self.seed + number):
                    products = _hessian_times(model, parameters, found, to_device(batch, device), objective)
                    found = [
                        v + (1 - self.damping) * d - product.double() / (usual_size * self.scale)
                        for v, d, product in zip(start, found, products, strict=True)
                    ]
                    step, size = step + 1, 1 + (1 - self.damping) * size
                    # Noted on the device and read once a pass: reading it at every batch would make a GPU wait.
                    first_bad = torch.where((first_bad == 0) & ~(_norm(found) <= limit * size), step, first_bad)
                if bad := int(first_bad):
                    raise DivergedError(
                        f"LiSSA grew out of bounds at iteration {bad}; a larger scale (now {self.scale:g}) or damping "
                        f"(now {self.damping:g}) makes it converge"
                    )
        return {name: part / self.scale for name, part in zip(names, found, strict=True)}


Solver = ConjugateGradients | LiSSA


def _loss(model: nn.Module, batch: Batch, objective: Objective) -> Tensor:
    return objective.per_sample(objective.outputs(model, batch), objective.targets(batch)).sum()


def _hessian_times(model: nn.Module, parameters: Parts, vector: Parts, batch: Batch, objective: Objective) -> Parts:
    """Σ_n ∇²ℓ_n·v = ∇⟨∇ Σ_n ℓ_n, v⟩."""
    slopes = _gradients(_loss(model, batch, objective), parameters, create_graph=True)
    return _gradients(_inner(slopes, vector), parameters)


def _gauss_newton_times(model: nn.Module, parameters: Parts, vector: Parts, batch: Batch, objective: Objective) -> Parts:
    """Σ_n J_nᵀ H_n J_n·v. J·v = ∂⟨Jᵀu, v⟩/∂u, Jᵀu being linear in u: backward passes alone, on the caller's module itself."""
    logits = objective.outputs(model, batch)
    cotangent = torch.zeros_like(logits, requires_grad=True)
    pulled = _gradients(logits, parameters, cotangent, create_graph=True)
    (pushed,) = _gradients(_inner(pulled, vector), [cotangent])
    outputs = logits.detach().requires_grad_()
    (slope,) = _gradients(objective.per_sample(outputs, objective.targets(batch)).sum(), [outputs], create_graph=True)
    (curved,) = _gradients(slope, [outputs], pushed)
    return _gradients(logits, parameters, curved)


def _gradients(output: Tensor, inputs: Parts, weights: Tensor | None = None, create_graph: bool = False) -> Parts:
    if not output.requires_grad:  # a constant, such as the slope of a linear loss
        return [torch.zeros_like(each) for each in inputs]
    return grad(output, inputs, weights, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True)


def _inner(parts: Parts, vector: Parts) -> Tensor:
    return torch.stack([(part * each.to(part)).sum() for part, each in zip(parts, vector, strict=True)]).sum()


def _mean(
    model: nn.Module, names: Sequence[str], batches: Batches, one: Callable[[Parts, Batch], Parts], description: str, progress: bool
) -> tuple[Vector, int]:
    """The mean over samples of what `one` sums over a batch."""
    count, device = 0, device_of(model)
    with _ready(model, names) as parameters:
        totals = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
        for batch in track(batches, description, total=len(batches), enabled=progress):
            for total, part in zip(totals, one(parameters, to_device(batch, device)), strict=True):
                total += part.detach()
            count += batch_size(batch)
    return {name: total / count for name, total in zip(names, totals, strict=True)}, count


@contextmanager
def _ready(model: nn.Module, names: Sequence[str]) -> Iterator[Parts]:
    """The model in eval mode, gradients on for these parameters alone, attention by formulas that can be differentiated twice."""
    held = dict(model.named_parameters())
    unknown = [name for name in names if name not in held]
    if unknown:
        raise InputError("vector", "must name parameters of the model", unknown)
    with undisturbed(model, {name: held[name] for name in names}), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield [held[name] for name in names]


def _plus(first: Vector, factor: float, second: Vector) -> Vector:
    return {name: first[name] + factor * second[name] for name in first}


def _dot(first: Vector, second: Vector) -> float:
    return float(_inner(list(first.values()), list(second.values())))


def _norm(parts: Parts) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()


def _check(argument: str, rule: str, found: float, holds: bool) -> None:
    if not holds:
        raise InputError(argument, rule, found)
