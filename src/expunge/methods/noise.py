"""Add noise to the weights, more where they matter less to the remain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from expunge import curvature, fisher
from expunge.curvature import Vector
from expunge.curvature.solvers import ConjugateGradients
from expunge.data.batches import Data
from expunge.data.classes import no_labels
from expunge.editing.patches import Patch
from expunge.errors import InputError
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.model import heads
from expunge.training.tuning import Tuning
from expunge.validate import check_amount, check_choice, check_seed, check_whole, make_plain, shown

Kind = Literal["expected", "empirical", "sampled"]
NoiseKind = Literal["expected", "empirical", "sampled", "batch"]

FLOOR = 1e-8  # of a weight's Fisher information: one the data do not touch would otherwise get infinite noise


@dataclass(frozen=True)
class FisherNoise:
    """Add noise to every weight, more where it matters less to the remain data, then fine-tune.

    ŵ = w + (λσ²)^¼ F^-¼ ε, ε ~ N(0, I), F the diagonal Fisher of the remain data, mean over samples (eq. "fishernoise2"). `scale` is λσ².
    F counts as at least 1e-8, so the noise of a weight that is dead on all data is bounded. Frozen weights get none.

    Departures: `reading="released"` is Golatkar's rule (2020), which the released program has too: noise of variance α/(F + 1e-8), at most
    1e3·α (the classifier's 1e2·α), averaged over dimension 1, tenfold for the classifier and all vectors; the classifier's rows of
    forgotten classes are redrawn around 0. `scale` is then α. A class counts as forgotten where its label is in the forget data and not in
    the remain data, or where it is `label`; where there is none, no row is redrawn. `as_golatkar()` feeds it the per-sample Fisher of their
    program, `as_released()` the squared batch gradients of the paper's.
    """

    scale: float = 1e-11
    kind: NoiseKind = "expected"
    reading: Literal["text", "released"] = "text"
    label: int | None = None
    seed: int = 0
    tuning: Tuning | None = Tuning()

    def __post_init__(self) -> None:
        _check_settings(self)
        check_choice("reading", self.reading, ("text", "released"))
        if self.label is not None:
            check_whole("label", self.label, minimum=0)
        if self.label is not None and self.reading == "text":
            raise InputError("label", "is for the released reading: the text redraws no row", self.label)

    @classmethod
    def as_released(cls, scale: float = 1e-6, label: int | None = None, seed: int = 0, tuning: Tuning | None = None) -> FisherNoise:
        """The paper's released program at its last commit, without fine-tuning as there: F of squared batch gradients, FisherMask's.

        It changes with the batch size of `unlearn`; the program's is the default, 128.
        """
        return cls(scale, "batch", "released", label, seed, tuning)

    @classmethod
    def as_golatkar(cls, scale: float = 1e-6, label: int | None = None, seed: int = 0, tuning: Tuning | None = None) -> FisherNoise:
        """Golatkar's own program (2020), without fine-tuning as there: the same rule with F of single samples, expected over labels."""
        return cls(scale, "expected", "released", label, seed, tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "FisherNoise")
        if self.reading == "text":
            variances, redrawn = text_variances(_information(model, remain, self.kind, run), self.scale), {}
        else:
            head = run.head_of(model, forget)
            labels = _forgotten_labels(forget, remain, run) if self.label is None else (self.label,)
            redrawn = _rows(model, head, labels)
            variances = released_variances(_information(model, remain, self.kind, run), self.scale, head, redrawn)
        noise = standard_normal(variances, self.seed)
        values = {}
        for name, variance in variances.items():
            weight = model.get_parameter(name).detach().double()
            values[name] = weight.masked_fill(redrawn[name], 0) if name in redrawn else weight
            values[name] = values[name] + variance.sqrt() * noise[name]
        patch = run.edit(model, values)
        run.train(model, remain, self.tuning)
        return patch


@dataclass(frozen=True)
class NewtonNoise:
    """A Newton step to the remain data's optimum, and noise that covers how far it misses.

    ŵ = w − B⁻¹ ∇L(w, D_r) + (λσ²)^¼ B^-¼ ε, ε ~ N(0, I), B the Hessian of the remain data's loss (eq. "fishernoise1"). `scale` is λσ².

    Departures: B⁻¹ is that of the damped Gauss-Newton matrix, by conjugate gradients; B^-¼ that of the diagonal Fisher, as in
    `FisherNoise`; losses are means, so λσ² holds the number of samples.
    """

    scale: float = 1e-11
    solver: ConjugateGradients = ConjugateGradients()
    kind: Kind = "expected"
    seed: int = 0
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        _check_settings(self)
        if not isinstance(self.solver, ConjugateGradients):
            raise InputError("solver", "must be ConjugateGradients with its settings", shown(self.solver))

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "NewtonNoise")
        variances = text_variances(_information(model, remain, self.kind, run), self.scale)  # first: it may refuse the objective
        batches = run.batches(remain, "remain")
        slope, _ = curvature.gradient(model, batches, run.objective, run.progress)
        step = self.solver(model, batches, slope, run.objective, run.progress)
        noise = standard_normal(variances, self.seed)
        values = {name: model.get_parameter(name) - step[name] + variances[name].sqrt() * noise[name] for name in variances}
        patch = run.edit(model, values)
        run.train(model, remain, self.tuning)
        return patch


def text_variances(information: Mapping[str, Tensor], scale: float) -> Vector:
    """(λσ²)^½ F^-½, F at least 1e-8."""
    return {name: math.sqrt(scale) * part.clamp_min(FLOOR).rsqrt() for name, part in information.items()}


def released_variances(information: Mapping[str, Tensor], scale: float, head: tuple[str, ...], redrawn: Mapping[str, Tensor]) -> Vector:
    """Golatkar's rule, in its order: clamp, times α, mean over dimension 1, 1e-4 for redrawn rows, tenfold for the head and vectors."""
    variances = {}
    for name, part in information.items():
        variance = scale * (1 / (part + 1e-8)).clamp_max(1e2 if name in head else 1e3)
        if variance.dim() > 1:
            variance = variance.mean(1, keepdim=True).expand_as(part)
        if name in redrawn:
            variance = variance.masked_fill(redrawn[name], 1e-4)
        variances[name] = 10 * variance if name in head or part.dim() == 1 else variance
    return variances


def standard_normal(like: Mapping[str, Tensor], seed: int) -> Vector:
    """ε, drawn on the CPU in the order of the names: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.device) for name, part in like.items()}


def _information(model: nn.Module, remain: Data, kind: NoiseKind, run: Run) -> Vector:
    return fisher.diagonal(model, run.batches(remain, "remain"), kind=kind, objective=run.objective, progress=run.progress).mean()


def _forgotten_labels(forget: Data, remain: Data, run: Run) -> tuple[int, ...]:
    """Labels of the forget data that no remain sample has."""

    def labels_of(data: Data, argument: str) -> set[int]:
        labels: set[int] = set()
        for batch in run.batches(data, argument):
            targets = run.objective.targets(batch)
            if no_labels(run.objective, run.logits, targets):
                return set()
            labels |= {*targets.detach().unique().tolist()}
        return labels

    # Below zero are positions that do not count.
    return tuple(sorted(label for label in labels_of(forget, "forget") - labels_of(remain, "remain") if label >= 0))


def _rows(model: nn.Module, head: tuple[str, ...], labels: tuple[int, ...]) -> dict[str, Tensor]:
    """The head's rows of all these labels."""
    rows: dict[str, Tensor] = {}
    for label in labels:
        for name, mask in heads.class_rows(model, head, label).items():
            rows[name] = rows[name] | mask if name in rows else mask
    return rows


def _check_settings(method: FisherNoise | NewtonNoise) -> None:
    check_amount("scale", method.scale)
    check_choice("kind", method.kind, NoiseKind if isinstance(method, FisherNoise) else Kind)
    check_seed("seed", method.seed)
    check_tuning(method.tuning)
    make_plain(method)
