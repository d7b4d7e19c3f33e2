"""Compare what a planned pass attributes to a few drawn samples with what plain passes over these samples give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from expunge.data.batches import take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.drawn import Drawn, Part, gradients_of, same_form
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.kinds import Cotangents
from expunge.fisher.planning.definition import random_like, tolerance
from expunge.fisher.planning.passes import closed_forms
from expunge.fisher.planning.plan import Plan
from expunge.fisher.samples import Squares, as_pairs, batched, fresh, gradients, largest_of, sizes_of, unmasked
from expunge.runtime.nested import combine_tensors, leaves, tensors

NOISE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: below it there is but rounding
UNIT = {torch.float64: 1e-14, torch.float32: 2e-7}  # of it: what rounding mostly is
Tolerated = Callable[[Tensor], float]
Pair = tuple[Tensor, Tensor]  # what is judged, and what it should be


@dataclass(frozen=True)
class Kept:
    """Drawn samples of one batch, what the planned pass made of them, and their batch."""

    batch: Batch
    rows: Tensor
    samples: Batch  # these rows
    logits: Tensor
    cotangents: Tensor
    noise: Tensor  # of these rows
    parts: list[Part]
    passed: set[str]  # parameters that were used, but not kept
    slot: int = 0  # the memory they are in
    turn: int | None = None  # which of the uses of parameters were kept
    path: int = 0  # what the operations of the pass were
    number: int = 0  # of the cotangents

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, rows: slice) -> Kept:
        parts = [part._replace(inputs=part.inputs[rows], slopes=part.slopes[rows]) for part in self.parts]
        own = {name: getattr(self, name)[rows] for name in ("rows", "logits", "cotangents", "noise")}
        return replace(self, samples=take(self.samples, rows), parts=parts, **own)

    def joins(self, other: Kept) -> bool:
        """Whether the samples of both can go through the model together."""
        if not all(isinstance(leaf, Tensor) for batch in (self.samples, other.samples) for leaf in leaves(batch)):
            return False
        try:
            combine_tensors([self.samples, other.samples], lambda parts: _same(parts[0], parts[1]))
        except (ValueError, TypeError, AttributeError):
            return False
        alike = not (self.parts and other.parts) or same_form(self.parts, other.parts)
        return self.logits.shape[1:] == other.logits.shape[1:] and alike

    def without_parts(self) -> Kept:
        """The same for a comparison of logits and losses alone, without the memory of the rest."""
        return replace(self, batch=self.samples, rows=torch.arange(len(self), device=self.rows.device), parts=[])

    @property
    def bytes(self) -> int:
        return sum(part.inputs.nbytes + part.slopes.nbytes for part in self.parts) + sum(tensor.nbytes for tensor in tensors(self.batch))


def _same(first: Tensor, second: Tensor) -> Tensor:
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        raise ValueError("samples of different shapes")
    return first


def keep(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    plan: Plan,
    batch: Batch,
    rows: Tensor,
    objective: Objective,
    cotangents: Callable[[Tensor], Tensor],
    turn: int | None = None,
) -> Kept:
    """Make a planned pass over a batch for the drawn samples alone; `cotangents` gives what is sent back, by the logits."""
    drawn = Drawn(rows, turn=turn)
    sent = closed_forms(model, parameters, plan.layouts, plan.idle, batch, lambda logits: [cotangents(logits)], objective, Scratch(), drawn)
    if sent.unexpected:
        raise ModelError(f"used in another way: {sorted(sent.unexpected)}")
    if plan.batched:  # torch.func may be right for one cotangent, and wrong for several at once, as of torch.cdist
        batched(model, plan.batched, batch, [*sent.cotangents, random_like(sent.logits).flip(-1)], objective, drawn=drawn)
    chosen = sent.cotangents[0][rows]
    return Kept(
        batch, rows, take(batch, rows), sent.logits[rows], chosen, chosen.new_empty(len(rows), 0), drawn.parts, drawn.passed, turn=turn
    )


def apart(group: Sequence[Kept], cotangents: Cotangents, objective: Objective) -> list[Pair]:
    """What each sample's loss has for cotangents in its batch, and what it has alone."""
    pairs = []
    for one in (kept.cut(slice(row, row + 1)) for kept in group for row in range(len(kept))):
        pairs.append((one.cotangents, cotangents(one.logits, objective.targets(one.samples), one.noise)[one.number]))
    return pairs


@dataclass(frozen=True)
class Differences:
    wrong: set[str] = field(default_factory=set)
    together: bool = False  # the logits differ already
    shown: set[str] = field(default_factory=set)  # these have a gradient, and it is right
    faint: set[str] = field(default_factory=set)  # these have one that is off by no more than rounding may be beside those of others
    doubtful: set[str] = field(default_factory=set)  # of the faint ones those that are off by more than it mostly is
    largest: float = 0.0  # difference of a gradient, as a part of it

    def __bool__(self) -> bool:
        return bool(self.wrong) or self.together


class Comparison:
    """Σ_s r_s · gradient_s over drawn samples of the same form, r random, as the plan attributes it and as a plain pass gives it.

    `apart`: cotangents that are compared as well, each with what the sample's loss gives in other company.
    """

    def __init__(self, group: Sequence[Kept], plan: Plan, weights: Tensor, apart: Sequence[Pair] = ()) -> None:
        self.weights, self.apart = weights, list(apart)
        self.samples = group[0].samples
        if len(group) > 1:
            self.samples = combine_tensors([kept.samples for kept in group], lambda parts: torch.cat(list(parts)))
        self.logits, self.cotangents = (torch.cat([getattr(kept, name) for kept in group]) for name in ("logits", "cotangents"))
        self.weighted = self.cotangents * weights.to(self.cotangents.dtype).view(-1, *(1,) * (self.cotangents.dim() - 1))
        self.parts = [kept.parts for kept in group if kept.parts]
        passed = set().union(*(kept.passed for kept in group)) - {name for part in group[0].parts for name in part[:2]}
        self.names = [name for name in (*plan.layouts, *plan.batched, *plan.idle) if name not in passed]
        self._of_parts = sum(len(kept) for kept in group if kept.parts)  # they come first
        self._attributed: Squares | None = None

    def planned_again(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], plan: Plan, objective: Objective) -> Comparison:
        """The same with what a planned pass over these samples alone attributes to them, as products are rounded now."""
        rows, again = torch.arange(len(self.logits), device=self.logits.device), copy(self)
        kept = keep(model, parameters, plan, self.samples, rows, objective, lambda logits: self.cotangents)
        again.parts, again._of_parts, again._attributed = [kept.parts], len(rows), None
        return again

    @property
    def attributed(self) -> Squares:
        if self._attributed is None:
            self._attributed = gradients_of(self.parts, self.weights[: self._of_parts])
        return self._attributed

    def differences(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        objective: Objective,
        tolerated: Tolerated,
        samples: Batch | None = None,
        names: Sequence[str] | None = None,
        noise: float | None = None,
    ) -> Differences:
        """From a plain pass over the samples, given in another form where wanted; of these names alone, where given; with another `NOISE`.

        The device is waited for once. Raises InputError where the gradient of a sample's loss is another one beside other samples.
        """
        return self.begun(model, parameters, objective, samples, names).read(tolerated, noise=noise)

    def begun(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        objective: Objective,
        samples: Batch | None = None,
        names: Sequence[str] | None = None,
        order: float = torch.inf,
    ) -> Unread:
        """The same, queued on the device and not waited for; with another `order` by the norms of gradients, not the largest."""
        names = self.names if names is None else names
        with torch.enable_grad():
            plain = objective.logits(model, fresh(self.samples if samples is None else samples))
        if plain.shape != self.logits.shape:
            return Unread(largest_of(self.apart), self.apart, names, None, {})
        pairs: dict[str, Pair] = {}
        if names and plain.requires_grad:
            # The first layer's, too: torch's GroupNorm crashes in channels-last memory where the gradient of its input is not asked for.
            normed = any(isinstance(module, nn.GroupNorm) for module in model.modules())
            asked = parameters if normed else {name: parameters[name] for name in (next(iter(parameters)), *names)}
            reference = gradients(plain, asked, self.weighted)
            pairs = _paired(self.attributed, {name: reference[name] for name in names})
        outputs = unmasked(self.logits, plain.detach())
        sizes = torch.cat([largest_of([*self.apart, outputs]), largest_of([*pairs.values()], order).to(plain.device)])
        return Unread(sizes, self.apart, names, self.logits, {name: gradient for name, (_, gradient) in pairs.items()})


@dataclass(frozen=True)
class Unread:
    """A comparison on the device, not waited for yet."""

    sizes: Tensor  # of the pairs `apart`, of the logits, and of the gradients; of the first alone where the logits have another shape
    apart: Sequence[Pair]
    names: Sequence[str]
    logits: Tensor | None
    gradients: Mapping[str, Tensor]

    def read(self, tolerated: Tolerated, of_logits: Tolerated | None = None, noise: float | None = None) -> Differences:
        """`of_logits`: what is tolerated of these, where it is another."""
        sizes = as_pairs(self.sizes)
        check_apart(self.apart, sizes)
        if self.logits is None:
            return Differences(set(self.names), together=True)
        (difference, size), *others = sizes[len(self.apart) :]
        if not (difference < (of_logits or tolerated)(self.logits) * size or difference == 0):
            return Differences(set(self.names), together=True)
        return _differing(self.gradients, others, tolerated, noise)


def judged(attributed: Squares, reference: Mapping[str, Tensor | None], tolerated: Tolerated) -> Differences:
    """Which gradients differ, and which there are."""
    pairs = _paired(attributed, reference)
    return _differing({name: gradient for name, (_, gradient) in pairs.items()}, sizes_of(list(pairs.values())), tolerated)


def _paired(attributed: Squares, reference: Mapping[str, Tensor | None]) -> dict[str, Pair]:
    pairs = {}
    for name, gradient in reference.items():
        value = attributed.get(name)
        if gradient is not None and value is not None:
            pairs[name] = value.to(gradient.dtype), gradient
        elif gradient is not None:
            pairs[name] = torch.zeros_like(gradient), gradient
        elif value is not None:
            pairs[name] = value, torch.zeros_like(value)
    return pairs


def _differing(
    gradients: Mapping[str, Tensor], sizes: Sequence[tuple[float, float]], tolerated: Tolerated, part: float | None = None
) -> Differences:
    top, worst = max((size for _, size in sizes), default=0.0), 0.0
    wrong, shown, faint, doubtful = set[str](), set[str](), set[str](), set[str]()
    for (name, gradient), (difference, size) in zip(gradients.items(), sizes, strict=True):
        noise = (NOISE.get(gradient.dtype, NOISE[torch.float32]) if part is None else part) * top
        if not difference <= max(tolerated(gradient) * size, noise):
            wrong.add(name)
            worst = max(worst, difference / size if size else torch.inf)
        elif size and difference <= tolerated(gradient) * size:
            shown.add(name)
        elif size:
            faint.add(name)
            if difference > UNIT.get(gradient.dtype, UNIT[torch.float32]) * top:
                doubtful.add(name)
    return Differences(wrong, False, shown, faint, doubtful, worst)


def allowed(tensor: Tensor) -> float:
    """How far two sound computations may be apart, as the caller's settings round: TF32 keeps 10 bits."""
    rounded = tensor.is_cuda and tensor.dtype == torch.float32 and (tf32.in_matmuls() or tf32.in_convolutions())
    return 0.15 if rounded else tolerance(tensor)


def check_apart(pairs: Sequence[Pair], sizes: Sequence[tuple[float, float]]) -> None:
    """Raise InputError where the gradient of a sample's loss is another one beside other samples."""
    errors = [difference / size if size else (torch.inf if difference else 0.0) for difference, size in sizes[: len(pairs)]]
    if any(not error < allowed(other) / 10 for error, (_, other) in zip(errors, pairs, strict=True)):
        rule = "must give each sample its own loss; divisions by a count over the batch, batch statistics and pairs of samples do not"
        raise InputError("objective.losses", rule, f"a gradient that changes by {max(errors):.1%} with the rest of the batch")
