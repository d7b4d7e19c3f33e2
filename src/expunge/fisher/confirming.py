"""Confirm, batch by batch, what a plan attributes to single samples: a few are drawn at random and compared with plain passes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, device_of, take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.drawn import TURNS, Drawn, Part, gradients_of, same_form
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.planning.passes import closed_forms
from expunge.fisher.planning.survey import COUPLED, Plan, random_like, tolerance
from expunge.fisher.samples import Squares, batched, fresh, gradients, relative_errors
from expunge.model.copying import copied
from expunge.runtime.modes import Generators
from expunge.runtime.nested import combine_tensors, leaves, map_tensors

SHARE = 64  # of this many samples one is drawn; at least one of every batch
FIRST = 16  # samples of a call that are all drawn, since the plan is young; half as many where batches are large
IRREGULAR = 8  # of every batch of a model that may choose rows by content
CALLS = 8  # with the same batch, where a model draws random numbers or moves its buffers
HELD = 64  # drawn samples at most that wait for a plain pass; it is shared, since one of a single sample costs several times its share
NOISE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: below it there is but rounding


def waiting_at_most(samples: int) -> int:
    """How many drawn samples of batches of this size share a plain pass."""
    return max(1, min(HELD, samples // 8))


class Revised(Exception):
    """The plan does not hold for these parameters: it must be changed, and whatever was added up by it is void."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


@dataclass(frozen=True)
class Kept:
    """Drawn samples of one batch, what the planned pass made of them, and their batch."""

    batch: Batch
    rows: Tensor
    samples: Batch  # these rows
    logits: Tensor
    cotangents: Tensor
    alone: Tensor  # the cotangents that each sample's loss alone would give
    parts: list[Part]
    passed: set[str]  # parameters that were used, but not kept
    slot: int = 0  # the memory they are in

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, rows: slice) -> Kept:
        parts = [part._replace(inputs=part.inputs[rows], slopes=part.slopes[rows]) for part in self.parts]
        logits, cotangents, alone = (tensor[rows] for tensor in (self.logits, self.cotangents, self.alone))
        return Kept(self.batch, self.rows[rows], take(self.samples, rows), logits, cotangents, alone, parts, self.passed)

    def joins(self, other: Kept) -> bool:
        """Whether the samples of both can go through the model together."""
        if not all(isinstance(leaf, Tensor) for batch in (self.samples, other.samples) for leaf in leaves(batch)):
            return False
        try:
            combine_tensors([self.samples, other.samples], lambda parts: _same(parts[0], parts[1]))
        except (ValueError, TypeError, AttributeError):
            return False
        return self.logits.shape[1:] == other.logits.shape[1:] and same_form(self.parts, other.parts)


class Confirmation:
    """Draws samples, and compares their logits, the gradients of their losses and those of their weights with plain passes.

    With weights r drawn at random, Σ_s r_s · gradient_s as the plan attributes it must be the gradient of Σ_s r_s · loss_s: a row that is
    counted to another sample, or belongs to two, carries the wrong weight. One plain pass serves the drawn samples of several batches.
    `confirmed`: the parameters that had a gradient in such a comparison; where there is none, nothing is shown.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective, seed: int) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self.generator = numpy.random.Generator(numpy.random.Philox(key=[seed % 2**64, 1]))  # apart from all others
        self.confirmed: set[str] = set()
        self.irregular = False  # the model may choose rows out of sight
        self.clearances = 0  # how often rounding alone gave the alarm
        self._drawn, self._steady, self._turn = 0, False, 0
        self._buffers = [module._buffers for module in model.modules() if module._buffers]
        self._norms = any(isinstance(module, nn.GroupNorm) for module in model.modules())
        self._waiting: list[Kept] = []

    def moving(self) -> _Moving:
        return _Moving.now(self._buffers)

    def begin(self) -> None:
        """Start again, on the same data."""
        self.confirmed.clear()
        self._waiting.clear()
        self._drawn = 0

    def steady(self, batch: Batch, before: _Moving) -> None:
        """Raise ModelError where the output changes from call to call; looked into where random numbers were drawn or buffers moved."""
        now = _Moving.now(self._buffers)
        random = not now.generators.same_as(before.generators)
        if not random and (self._steady or now.buffers == before.buffers):
            return
        with torch.no_grad():
            first, *others = (self.objective.logits(self.model, fresh(batch)) for _ in range(2 if self._steady else CALLS))
        self._steady = True
        if any(other.shape != first.shape for other in others) or any(
            not error < NOISE.get(first.dtype, tolerance(first)) for error in relative_errors([(other, first) for other in others])
        ):
            raise ModelError(COUPLED)

    def draw(self, samples: int) -> list[int]:
        """The numbers of the samples of a batch to be kept."""
        young = (FIRST if samples <= FIRST else FIRST // 2) - self._drawn
        count = max(1, samples // SHARE, min(samples, young), min(samples, IRREGULAR) if self.irregular else 0)
        return [int(row) for row in self.generator.choice(samples, count, replace=False)]

    @property
    def slot(self) -> int:
        """The first memory that no waiting sample is in."""
        used = {kept.slot for kept in self._waiting}
        return next(number for number in itertools.count() if number not in used)

    def turn(self, on_cuda: bool) -> int | None:
        """In which part of the parameters the samples of this batch are compared: in all while the plan is young, and in CUDA graphs."""
        young = self._drawn < FIRST // 2
        return None if young or on_cuda or self.irregular or len(self.parameters) < 2 * TURNS else self._turn

    def add(self, kept: Kept, plan: Plan, samples: int) -> None:
        """Take over what a planned pass kept of its drawn samples; now and then the plain pass is made."""
        if self._waiting and not self._waiting[0].joins(kept):
            self.settle(plan)
        self._waiting.append(kept)
        limit = waiting_at_most(samples)
        if self._drawn < FIRST // 2 or self.irregular or sum(map(len, self._waiting)) >= limit:
            self.settle(plan)
        self._drawn += len(kept)

    def settle(self, plan: Plan) -> None:
        """Compare all samples that wait."""
        waiting, self._waiting = self._waiting, []
        self._turn = (self._turn + 1) % TURNS
        if not waiting:
            return
        check_alone(waiting)
        groups = [waiting]
        if len(waiting) == 1 and len(waiting[0]) > 1:  # of one batch: one goes alone, as the definition has it, others in other company
            edges = sorted({0, 1, 1 + len(waiting[0]) // 2, len(waiting[0])})
            groups = [[waiting[0].cut(slice(*ends))] for ends in itertools.pairwise(edges)]
        for group in groups:
            self._compare(group, plan)

    def _compare(self, group: list[Kept], plan: Plan) -> None:
        found = self._differences(self.model, self.parameters, group, plan)
        if not (found.wrong or found.together):
            self.confirmed |= found.shown
            return
        for kept in group:
            doubted = self._doubted(kept, plan, found)
            if doubted.together:
                self._explain(kept, plan)
                if not doubted.wrong:  # nothing is left that could be computed in another way
                    raise ModelError(COUPLED)
            if doubted.wrong:
                raise Revised(doubted.wrong)
        self.clearances += 1

    def _doubted(self, kept: Kept, plan: Plan, found: _Differences) -> _Differences:
        """The same comparison in float64, where a ReLU that flips by rounding is none."""
        if all(value.dtype == torch.float64 for value in self.parameters.values()):
            return found
        try:
            twin = copied(self.model).double()
            named = dict(twin.named_parameters())
            parameters = {name: named[name] for name in self.parameters}
            for name, value in named.items():
                value.requires_grad_(name in parameters)
            batch = map_tensors(kept.batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
            with torch.autocast(device_of(twin).type, enabled=False), tf32.switched_off():
                again = keep(twin, parameters, plan, batch, kept.rows, self.objective)
                return self._differences(twin, parameters, [again], plan)
        except Exception:  # a model that cannot be copied, or cannot run in float64
            return found

    def _differences(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], group: Sequence[Kept], plan: Plan) -> _Differences:
        samples = (
            group[0].samples if len(group) == 1 else combine_tensors([kept.samples for kept in group], lambda parts: torch.cat(list(parts)))
        )
        logits, cotangents = (torch.cat([getattr(kept, name) for kept in group]) for name in ("logits", "cotangents"))
        weights = torch.from_numpy(self.generator.normal(size=len(logits))).to(logits.device)
        weighted = cotangents * weights.to(cotangents.dtype).view(-1, *(1,) * (cotangents.dim() - 1))
        passed = set().union(*(kept.passed for kept in group)) - {name for part in group[0].parts for name in part[:2]}
        names = [name for name in (*plan.layouts, *plan.batched, *plan.idle) if name not in passed]
        with torch.enable_grad():
            plain = self.objective.logits(model, fresh(samples))
        if plain.shape != logits.shape or not relative_errors([(logits, plain)])[0] < self.tolerated(logits):
            return _Differences(set(names), True, set())
        if not (names and plain.requires_grad):
            return _Differences(set(), False, set())
        # The first layer's, too: torch's GroupNorm crashes in channels-last memory where the gradient of its input is not asked for.
        first = next(iter(parameters))
        asked = {name: parameters[name] for name in (first, *names)} if not self._norms else parameters
        reference = gradients(plain, asked, weighted)
        attributed = gradients_of([kept.parts for kept in group], weights)
        wrong, shown = self._judged(attributed, {name: reference[name] for name in names})
        return _Differences(wrong, False, shown)

    def _judged(self, attributed: Squares, reference: Mapping[str, Tensor | None]) -> tuple[set[str], set[str]]:
        """The names whose gradients differ, and those that have one."""
        pairs = {}
        for name, gradient in reference.items():
            value = attributed.get(name)
            if gradient is not None or value is not None:
                like = gradient if gradient is not None else value
                assert like is not None
                pairs[name] = [torch.zeros_like(like) if part is None else part for part in (value, gradient)]
        if not pairs:
            return set(), set()
        parts = [part for value, gradient in pairs.values() for part in (value.detach().to(gradient.dtype) - gradient, gradient.detach())]
        largest = torch.stack([part.abs().amax().double() if part.numel() else part.new_zeros((), dtype=torch.float64) for part in parts])
        sizes = largest.tolist()
        top, wrong, shown = max(sizes[1::2]), set(), set()
        for (name, (_, gradient)), difference, size in zip(pairs.items(), sizes[::2], sizes[1::2], strict=True):
            noise = NOISE.get(gradient.dtype, NOISE[torch.float32]) * top
            if not difference <= max(self.tolerated(gradient) * size, noise):
                wrong.add(name)
            elif size:
                shown.add(name)
        return wrong, shown

    def tolerated(self, tensor: Tensor) -> float:
        """Beyond it a difference is looked into in float64; each false alarm makes the next less likely."""
        largest = tolerance(tensor)
        if tensor.dtype == torch.float64:
            return largest
        if tensor.is_cuda and (tf32.in_matmuls() or tf32.in_convolutions()):
            return 0.15
        return min(largest, largest / 10 * 4**self.clearances)

    def _explain(self, kept: Kept, plan: Plan) -> None:
        """Raise, where the model itself treats a sample in another way as its batch changes; else only the closed forms do."""
        with torch.enable_grad():  # torch has other ways without
            together = self.objective.logits(self.model, fresh(kept.batch))[kept.rows]
            again = torch.cat([self.objective.logits(self.model, fresh(take(kept.samples, slice(i, i + 1)))) for i in range(len(kept))])
        if together.shape != again.shape or not relative_errors([(together, again)])[0] < tolerance(together) / 10:
            raise ModelError(COUPLED)


class _Moving(NamedTuple):
    """What a call of a model in eval mode should leave as it is: random numbers, and the buffers, by identity and version."""

    generators: Generators
    buffers: list[tuple[int, int]]

    @classmethod
    def now(cls, places: Sequence[Mapping[str, Tensor | None]]) -> _Moving:
        buffers = [(id(buffer), buffer._version) for place in places for buffer in place.values() if buffer is not None]
        return cls(Generators.now(), buffers)


@dataclass(frozen=True)
class _Differences:
    wrong: set[str]
    together: bool  # the logits differ already
    shown: set[str]


def keep(model: nn.Module, parameters: Mapping[str, nn.Parameter], plan: Plan, batch: Batch, rows: Tensor, objective: Objective) -> Kept:
    """Make a planned pass for its drawn samples alone, with a random cotangent."""
    drawn = Drawn(rows)
    result = closed_forms(
        model, parameters, plan.layouts, plan.idle, batch, lambda logits: [random_like(logits)], objective, Scratch(), drawn
    )
    if result.unexpected:
        raise ModelError(f"used in another way: {sorted(result.unexpected)}")
    if plan.batched:
        batched(model, plan.batched, batch, result.cotangents, objective, drawn=drawn)
    cotangents = result.cotangents[0][rows]
    return Kept(batch, rows, take(batch, rows), result.logits[rows], cotangents, cotangents, drawn.parts, drawn.passed)


def check_alone(waiting: Sequence[Kept]) -> None:
    """Raise InputError where the gradient of a sample's loss is another one beside other samples."""
    errors = relative_errors([(kept.cotangents, kept.alone) for kept in waiting])
    if any(not error < tolerance(kept.alone) / 10 for error, kept in zip(errors, waiting, strict=True)):
        rule = "must give each sample its own loss; divisions by a count over the batch, batch statistics and pairs of samples do not"
        raise InputError("objective.losses", rule, f"a gradient that changes by {max(errors):.1%} with the rest of the batch")


def _same(first: Tensor, second: Tensor) -> Tensor:
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        raise ValueError("samples of different shapes")
    return first


def samples_with_gradient(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], names: Sequence[str], batch: Batch, objective: Objective
) -> dict[int, set[str]]:
    """Samples, by number, that have a gradient of at least one of these parameters that no other sample before had, and which."""
    missing, having = set(names), {}
    for index in range(batch_size(batch)):
        if not missing:
            break
        with torch.enable_grad():
            logits = objective.logits(model, fresh(take(batch, slice(index, index + 1))))
        if not logits.requires_grad:
            continue
        found = gradients(logits, parameters, random_like(logits))
        present = {name for name in missing if (gradient := found[name]) is not None and bool(gradient.any())}
        if present:
            having[index] = present
            missing -= present
    return having
