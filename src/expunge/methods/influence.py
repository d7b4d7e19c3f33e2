"""Forget by one Newton step away from the forget data: the influence function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import nn

from expunge import curvature
from expunge.curvature.solvers import ConjugateGradients, LiSSA, Solver, check_solver
from expunge.data.batches import Batches, Data, batch_size
from expunge.data.objective import Batch
from expunge.editing.patches import Patch
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.training.tuning import Tuning
from expunge.validate import check_amount, check_choice, make_plain


@dataclass(frozen=True)
class Influence:
    """One Newton step that undoes the forget data's influence on the weights.

    ŵ = w + (1/|D_f|) ∇²L(w, D)⁻¹ ∇L(w, D_f), L the sum of losses, D the forget and the remain data (section Background).

    `gradient` "mean" is that formula: the step for one average sample of D_f, |D_f| times smaller than the step for all of them.
    "sum" leaves the factor 1/|D_f| out: the first-order estimate of training without D_f. The `solver` approximates the inverse, with
    damping: conjugate gradients on the Gauss-Newton matrix, or LiSSA on the Hessian, which the text names and which may diverge.

    `strength` multiplies the step. 1 is the estimate and forgets almost nothing of a trained network; see docs/influence.md.

    Departures: the released program takes the sum, by LiSSA: `as_released()`.
    """

    gradient: Literal["mean", "sum"] = "mean"
    strength: float = 1.0
    solver: Solver = ConjugateGradients()
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        check_choice("gradient", self.gradient, ("mean", "sum"))
        check_amount("strength", self.strength)
        check_solver("solver", self.solver)
        check_tuning(self.tuning)
        make_plain(self)

    @classmethod
    def as_released(cls, tuning: Tuning | None = None) -> Influence:
        """The settings of the authors' released program."""
        return cls("sum", solver=LiSSA(damping=0.01, scale=20, passes=30), tuning=tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "Influence")
        forget_batches, remain_batches = run.batches(forget, "forget"), run.batches(remain, "remain")
        mean, forgotten = curvature.gradient(model, forget_batches, run.objective, run.progress)
        total = forgotten + sum(batch_size(batch) for batch in remain_batches)
        factor = (1 if self.gradient == "mean" else forgotten) / total
        target = {name: factor * part for name, part in mean.items()}
        step = self.solver(model, together(forget_batches, remain_batches), target, run.objective, run.progress)
        values = {name: model.get_parameter(name) + self.strength * part for name, part in step.items()}
        patch = run.edit(model, values)
        run.train(model, remain, self.tuning)
        return patch


def together(first: Batches, second: Batches) -> Batches:
    """The batches of both; in a shuffled pass those of the smaller set come at random places among the others."""

    def read(seed: int | None) -> Iterator[Batch]:
        if seed is None:
            return chain(first, second)
        turns = torch.randperm(len(first) + len(second), generator=torch.Generator().manual_seed(seed)) < len(first)
        sources = {True: first.shuffled(seed), False: second.shuffled(seed)}
        return (batch for turn in turns.tolist() for batch in _next(sources[turn]))

    return Batches(read, len(first) + len(second))


def _next(source: Iterator[Batch]) -> Iterator[Batch]:
    """One batch, or none where a loader has fewer than its length says."""
    for batch in source:
        yield batch
        return
