"""Solve for a step from products with the curvature, by conjugate gradients or LiSSA."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from expunge.curvature.products import Mean, Step, gauss_newton_times, hessian_times, ready
from expunge.curvature.vectors import Parts, Vector, become, check_vector, dot, norm, plus, scaled
from expunge.data.batches import Data, as_batches, batch_size
from expunge.data.objective import Batch, Objective
from expunge.errors import DivergedError, InputError
from expunge.runtime.progress import track
from expunge.validate import check_amount, check_number, check_positive, check_seed, check_whole, make_plain, shown

ROOM = 10.0  # how far LiSSA may pass the bound of a positive curvature before it counts as diverged: a network's dips below zero


@dataclass(frozen=True)
class ConjugateGradients:
    """(G + damping·I)⁻¹ v, G the mean Gauss-Newton matrix, by conjugate gradients: one pass over the data per iteration.

    Stops when the residual is `tolerance` of ‖v‖ or after `iterations`, and returns the solution so far.
    """

    damping: float = 0.01
    iterations: int = 50
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("damping", self.damping)
        check_whole("iterations", self.iterations, minimum=1)
        check_amount("tolerance", self.tolerance)
        make_plain(self)

    def __call__(
        self, model: nn.Module, batches: Data, target: Vector, objective: Objective = Objective(), progress: bool = False
    ) -> Vector:
        check_vector("target", model, target)
        data = as_batches(batches)
        residual, unit = scaled(target)
        solution = [torch.zeros_like(part) for part in residual]
        direction = [part.clone() for part in residual]  # changed in place: a graph reads it
        size = first = dot(residual, residual)
        with (
            ready(model, list(target)) as parameters,
            closing(track(range(1, self.iterations + 1), "conjugate gradients", enabled=progress)) as iterations,
        ):
            mean = Mean(model, parameters, partial(gauss_newton_times, model, objective, parameters, direction), objective)
            for iteration in iterations:
                if size <= self.tolerance**2 * first < math.inf:
                    break
                product = plus(mean(data), self.damping, direction)
                along = dot(direction, product)
                if not math.isfinite(along):
                    raise DivergedError(f"conjugate gradients, iteration {iteration}: the gradient or the curvature is not finite")
                if along <= 0:
                    advice = f"a loss that is not convex in the logits needs more damping (now {self.damping:g})"
                    raise DivergedError(f"conjugate gradients, iteration {iteration}: the curvature is not positive; {advice}")
                solution = plus(solution, size / along, direction)
                residual = plus(residual, -size / along, product)
                before, size = size, dot(residual, residual)
                become(direction, plus(residual, size / before, direction))
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
        check_whole("passes", self.passes, minimum=1)
        check_seed("seed", self.seed)
        make_plain(self)

    def __call__(
        self, model: nn.Module, batches: Data, target: Vector, objective: Objective = Objective(), progress: bool = False
    ) -> Vector:
        check_vector("target", model, target)
        data = as_batches(batches)
        usual_size = sum(batch_size(batch) for batch in data) / len(data)
        start, unit = scaled(target)
        series = [part.clone() for part in start]  # changed in place, as all below: a graph reads and writes them
        bound = ROOM * norm(start)
        limit, count, first_bad = bound.clone(), torch.zeros_like(bound), torch.zeros_like(bound)

        def add_term(parameters: Parts, batch: Batch) -> None:
            products = hessian_times(model, objective, parameters, series, batch)
            terms = zip(start, series, products, strict=True)
            become(series, [v + (1 - self.damping) * d - product.double() / (usual_size * self.scale) for v, d, product in terms])
            limit.mul_(1 - self.damping).add_(bound)
            count.add_(1)
            # Kept on the device and read once per pass: reading it at every batch would make a GPU wait.
            first_bad.copy_(torch.where((first_bad == 0) & ~(norm(series) <= limit), count, first_bad))

        with ready(model, list(target)) as parameters, closing(track(range(self.passes), "LiSSA", enabled=progress)) as passes:
            step = Step(model, partial(add_term, parameters), objective)
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
    """One of these, or a solver of one's own with the same call."""
    if not callable(solver) or isinstance(solver, type):
        raise InputError(argument, "must be a solver with its settings, such as ConjugateGradients()", shown(solver))
