"""Products with the curvature of the loss, and steps solved from them: no matrix is ever formed.

With ℓ_n the loss and J_n the Jacobian of the logits of sample n, the curvature is the mean over samples of

- the Hessian        ∇²ℓ_n, which a network need not have positive
- the Gauss-Newton   J_nᵀ (∂²ℓ_n/∂logits²) J_n, positive for the log-loss, and then the Fisher matrix expected over labels

Vectors name parameters and are float64; products are taken in the model's own type, in eval mode, one batch's graph at a time. A mean
counts samples, not batches, so it does not depend on how the data are cut. On CUDA, batches of one form replay a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel

from expunge.batches import Data, as_batches, batch_size, device_of, few, to_device
from expunge.calling import said
from expunge.checks import check_module
from expunge.errors import DivergedError, InputError, ModelError
from expunge.fisher.engine import undisturbed
from expunge.modes import hooked
from expunge.objective import Batch, Objective
from expunge.progress import track
from expunge.replays import Replays
from expunge.settings import check_amount, check_number, check_positive, check_seed, check_whole, make_plain, shown

Vector = dict[str, Tensor]  # parameter name -> float64 tensor of the parameter's shape
Parts = Sequence[Tensor]  # of a vector, in the order of its names

ROOM = 10.0  # how far LiSSA may pass the bound of a positive curvature before it counts as diverged: a network's dips below zero


def gradient(model: nn.Module, batches: Data, objective: Objective = Objective(), progress: bool = False) -> tuple[Vector, int]:
    """The mean over samples of ∇ℓ_n for every parameter that requires a gradient, and the number of samples."""
    check_module(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise ModelError("model: has no parameter that requires a gradient, nothing can be changed")
    data = as_batches(batches)
    with _ready(model, names) as parameters:
        mean = _Mean(model, parameters, lambda batch: _gradients(_loss(model, objective, batch), parameters), objective)
        found = mean(track(iter(data), "gradient", total=data.known, enabled=progress))
    return dict(zip(names, found, strict=True)), mean.count


def hessian_product(
    model: nn.Module, batches: Data, vector: Mapping[str, Tensor], objective: Objective = Objective(), progress: bool = False
) -> Vector:
    """The mean Hessian of the loss times `vector`, over the parameters it names."""
    _check_vector("vector", model, vector)
    data = as_batches(batches)
    with _ready(model, list(vector)) as parameters:
        mean = _Mean(model, parameters, partial(_hessian_times, model, objective, parameters, list(vector.values())), objective)
        found = mean(track(iter(data), "Hessian product", total=data.known, enabled=progress))
    return dict(zip(vector, found, strict=True))


def gauss_newton_product(
    model: nn.Module, batches: Data, vector: Mapping[str, Tensor], objective: Objective = Objective(), progress: bool = False
) -> Vector:
    """The mean Gauss-Newton matrix times `vector`, over the parameters it names."""
    _check_vector("vector", model, vector)
    data = as_batches(batches)
    with _ready(model, list(vector)) as parameters:
        mean = _Mean(model, parameters, partial(_gauss_newton_times, model, objective, parameters, list(vector.values())), objective)
        found = mean(track(iter(data), "Gauss-Newton product", total=data.known, enabled=progress))
    return dict(zip(vector, found, strict=True))


@dataclass(frozen=True)
class ConjugateGradients:
    """(G + damping·I)⁻¹ v, G the mean Gauss-Newton matrix, by conjugate gradients: a pass over the data an iteration.

    Ends when the residual is `tolerance` of ‖v‖ or after `iterations`, with what it has by then.
    """

    damping: float = 0.01
    iterations: int = 50
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("damping", self.damping)
        check_whole("iterations", self.iterations, least=1)
        check_amount("tolerance", self.tolerance)
        make_plain(self)

    def __call__(
        self, model: nn.Module, batches: Data, target: Vector, objective: Objective = Objective(), progress: bool = False
    ) -> Vector:
        _check_vector("target", model, target)
        data = as_batches(batches)
        residual, unit = _scaled(target)
        solution = [torch.zeros_like(part) for part in residual]
        direction = [part.clone() for part in residual]  # changed in place: a graph reads it
        size = first = _dot(residual, residual)
        with (
            _ready(model, list(target)) as parameters,
            closing(track(range(1, self.iterations + 1), "conjugate gradients", enabled=progress)) as iterations,
        ):
            mean = _Mean(model, parameters, partial(_gauss_newton_times, model, objective, parameters, direction), objective)
            for iteration in iterations:
                if size <= self.tolerance**2 * first < math.inf:
                    break
                product = _plus(mean(data), self.damping, direction)
                along = _dot(direction, product)
                if not math.isfinite(along):
                    raise DivergedError(f"conjugate gradients, iteration {iteration}: the gradient or the curvature is not finite")
                if along <= 0:
                    advice = f"a loss that is not convex in the logits needs more damping (now {self.damping:g})"
                    raise DivergedError(f"conjugate gradients, iteration {iteration}: the curvature is not positive; {advice}")
                solution = _plus(solution, size / along, direction)
                residual = _plus(residual, -size / along, product)
                before, size = size, _dot(residual, residual)
                _become(direction, _plus(residual, size / before, direction))
        return {name: part * unit for name, part in zip(target, solution, strict=True)}


@dataclass(frozen=True)
class LiSSA:
    """(H + damping·scale·I)⁻¹ v, H the mean Hessian, by the Neumann series, each term from the next batch.

    d ← v + (1 − damping)·d − H_b·d / scale over the batches b of `passes` shuffled passes, from d = v; the result is d / scale. A batch's
    H_b counts by its size, so that the mean over a pass is H. It converges where every batch's Hessian has its eigenvalues λ
    between −damping·scale and (2 − damping)·scale: |1 − damping − λ/scale| < 1. It raises `DivergedError` where it does not.
    """

    damping: float = 0.01
    scale: float = 20.0
    passes: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("damping", self.damping, 0, 1)
        check_positive("scale", self.scale)
        check_whole("passes", self.passes, least=1)
        check_seed("seed", self.seed)
        make_plain(self)

    def __call__(
        self, model: nn.Module, batches: Data, target: Vector, objective: Objective = Objective(), progress: bool = False
    ) -> Vector:
        _check_vector("target", model, target)
        data = as_batches(batches)
        usual_size = sum(batch_size(batch) for batch in data) / len(data)
        start, unit = _scaled(target)
        series = [part.clone() for part in start]  # changed in place, as all below: a graph reads and writes them
        bound = ROOM * _norm(start)
        limit, count, first_bad = bound.clone(), torch.zeros_like(bound), torch.zeros_like(bound)

        def add_term(parameters: Parts, batch: Batch) -> None:
            products = _hessian_times(model, objective, parameters, series, batch)
            terms = zip(start, series, products, strict=True)
            _become(series, [v + (1 - self.damping) * d - product.double() / (usual_size * self.scale) for v, d, product in terms])
            limit.mul_(1 - self.damping).add_(bound)
            count.add_(1)
            # Noted on the device and read once a pass: reading it at every batch would make a GPU wait.
            first_bad.copy_(torch.where((first_bad == 0) & ~(_norm(series) <= limit), count, first_bad))

        with _ready(model, list(target)) as parameters, closing(track(range(self.passes), "LiSSA", enabled=progress)) as passes:
            step = _Step(model, partial(add_term, parameters), objective)
            for number in passes:
                for batch in data.shuffled(self.seed + number):
                    step(batch)
                if bad := int(first_bad):
                    raise DivergedError(
                        f"LiSSA grew out of bounds at iteration {bad}; a larger scale (now {self.scale:g}) or damping "
                        f"(now {self.damping:g}) makes it converge"
                    )
        return {name: part / self.scale * unit for name, part in zip(target, series, strict=True)}


Solver = ConjugateGradients | LiSSA


def check_solver(argument: str, solver: Solver) -> None:
    """One of these, or one's own that can be called as they are."""
    if not callable(solver) or isinstance(solver, type):
        raise InputError(argument, "must be a solver with its settings, such as ConjugateGradients()", shown(solver))


def _loss(model: nn.Module, objective: Objective, batch: Batch) -> Tensor:
    return objective.per_sample(objective.logits(model, batch), objective.targets(batch)).sum()


def _hessian_times(model: nn.Module, objective: Objective, parameters: Parts, vector: Parts, batch: Batch) -> Parts:
    """Σ_n ∇²ℓ_n·v = ∇⟨∇ Σ_n ℓ_n, v⟩."""
    slopes = _gradients(_loss(model, objective, batch), parameters, create_graph=True)
    return _gradients(_inner(slopes, vector), parameters)


def _gauss_newton_times(model: nn.Module, objective: Objective, parameters: Parts, vector: Parts, batch: Batch) -> Parts:
    """Σ_n J_nᵀ H_n J_n·v. J·v = ∂⟨Jᵀu, v⟩/∂u, Jᵀu being linear in u: backward passes alone, on the caller's module itself."""
    logits = objective.logits(model, batch)
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
    try:
        return grad(output, inputs, weights, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        rule = "curvature needs a model and a loss that can be differentiated twice"
        raise InputError("objective", rule, said(error)) from error


def _inner(parts: Parts, vector: Parts) -> Tensor:
    return torch.stack([(part * each.to(part)).sum() for part, each in zip(parts, vector, strict=True)]).sum()


class _Step:
    """A step from batch to batch: on CUDA a graph that is replayed, which cannot look at labels, so they are looked at before."""

    def __init__(self, model: nn.Module, step: Callable[[Batch], None], objective: Objective) -> None:
        self.model, self.objective, self.device = model, objective, device_of(model)
        self.step = Replays(step) if self.device.type == "cuda" and not hooked(model) else step
        self._logits: torch.Size | None = None

    def __call__(self, batch: Batch) -> None:
        batch = to_device(batch, self.device)
        if self.device.type == "cuda":
            if self._logits is None:
                with torch.no_grad():
                    self._logits = self.objective.logits(self.model, few(batch)).shape
            self.objective.check_batch(self._logits, batch)
        self.step(batch)


class _Mean:
    """The mean over samples of what `one` sums over a batch, for every parameter; called again, over as many passes as wanted."""

    def __init__(self, model: nn.Module, parameters: Parts, one: Callable[[Batch], Parts], objective: Objective) -> None:
        self.totals = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
        self.count = 0
        self._add = _Step(model, partial(_add_up, self.totals, one), objective)

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
def _ready(model: nn.Module, names: Sequence[str]) -> Iterator[Parts]:
    """The model in eval mode, gradients on for these parameters alone, attention by formulas that can be differentiated twice."""
    held = dict(model.named_parameters())
    with undisturbed(model, {name: held[name] for name in names}), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield [held[name] for name in names]


def _scaled(target: Vector) -> tuple[list[Tensor], float]:
    """v / unit and the unit, the power of two next to v's largest entry: exact, and no square of v / unit under- or overflows."""
    parts = [part.double() for part in target.values()]
    largest = float(torch.stack([part.abs().max() for part in parts if part.numel()]).max())
    exponent = min(max(math.frexp(largest)[1], -1000), 1000)  # so that the unit and its inverse are floats
    return [part * 2.0**-exponent for part in parts], 2.0**exponent


def _plus(first: Parts, factor: float, second: Parts) -> list[Tensor]:
    return [one + factor * other for one, other in zip(first, second, strict=True)]


def _become(parts: Parts, values: Parts) -> None:
    for part, value in zip(parts, values, strict=True):
        part.copy_(value)


def _dot(first: Parts, second: Parts) -> float:
    return float(_inner(first, second))


def _norm(parts: Parts) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()


def _check_vector(argument: str, model: nn.Module, vector: Mapping[str, Tensor]) -> None:
    check_module(model)
    held = dict(model.named_parameters())
    if not vector or (unknown := [name for name in vector if name not in held]):
        raise InputError(argument, "must name parameters of the model", unknown if vector else "none")
    for name, part in vector.items():
        if part.shape != held[name].shape:
            raise InputError(argument, f"{name} must have shape {tuple(held[name].shape)}", tuple(part.shape))
