"""Confirm on a GPU without waiting for it: comparisons are queued behind the batches and read later.

A comparison is a pass of many small kernels. Launched while the device still works on batches that were queued before, it costs what its
kernels take; waited for, it would cost the launches of the comparison and of the next batches, too.

Products rounded to TF32 change the gradients of a deep network by a third and more (ResNet50), and no comparison of them shows anything.
There the plan is confirmed without TF32, by a planned pass over the drawn samples alone against a plain one. That takes several times as
long, so a part of the samples must do; of the others outputs and losses are compared. Where the process has found that of the same model
before, it is done from the first batch on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, take
from expunge.data.calling import out_of_memory
from expunge.data.labels import known_labels
from expunge.data.objective import Objective
from expunge.fisher.closed_forms import tf32
from expunge.fisher.company import LOSSES, in_other_parity
from expunge.fisher.comparing import Comparison, Differences, Kept, Pair, Unread, allowed, keep
from expunge.fisher.confirming import FIRST, Confirmation, Revised
from expunge.fisher.doubting import BY_PRECISION, in_channels_last, in_smaller_company
from expunge.fisher.kinds import Cotangents
from expunge.fisher.planning.definition import random_like, tolerance
from expunge.fisher.planning.plan import Plan
from expunge.fisher.samples import as_pairs, largest_of, output_error, unmasked
from expunge.runtime.transfers import sent

HELD = 128  # drawn samples at most that share a plain pass
COARSE = 16  # of them where products are rounded to TF32: of so many, one that is wrong stands out of what rounding does to all
HELD_PRECISELY = 32  # of them where gradients are compared without TF32,
EXACTLY = 8  # those of so many at most
MEMORY_BYTES = 1 << 30  # that a comparison takes at once
ROUNDED = 0.1  # what sound computations may be apart in TF32 or half precision is more
NOISY = 0.75  # of a gradient's norm: what rounding to TF32 may do in a deep network; rows of other samples are off by 1.4
OTHERS = 1.1  # of a gradient's norm beside one without TF32: of ResNet50 at random weights TF32, simulated, makes 0.9; rows of others 1.4
FAINT = 0.01  # of the largest gradient: of what is less, rounding to TF32 may leave nothing
ALIKE = 1.5  # how much further than a plain pass the planned one may be off by it
PRECISE = 0.05  # of gradients without TF32, where a ReLU flips now and then
HELD_BYTES = 256 << 20  # of their rows, or as much as the share of a batch below has
SHARE = 8  # of a batch that shares a plain pass whatever it takes; the rows of half of them are kept
DRAWN = 8  # samples in all where batches are fewer; of one batch at most half as many

_noisy: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # models of which rounding to TF32 hid everything, with what they were


class _Exact(NamedTuple):
    """The gradients of some samples without TF32."""

    unread: Unread
    own: Tensor  # how far those that the batches' own passes gave are from them, and their size

    @property
    def own_agree(self) -> bool:
        """But for what is faint beside the largest."""
        sizes = as_pairs(self.own)
        top = max((size for _, size in sizes), default=0.0)
        return all(off <= max(OTHERS * size, FAINT * top) for off, size in sizes)


class _Queued(NamedTuple):
    whole: list[Kept]  # with their rows
    comparison: Comparison
    unread: Unread
    exact: _Exact | None
    alone: Tensor  # how far the logits of one sample are from those it has alone, and their size


class QueuedConfirmation(Confirmation):
    """Compares the drawn samples of many batches at once: the logits and losses of all, the gradients of as many as memory allows.

    Which batches these are is drawn at random. The plain pass is in the memory format of the planned one, where it rounds alike; that the
    plan is the model's function in the caller's format is shown by its survey, where it has one. Where something differs or is not shown,
    the data are read again and each comparison is waited for, as on the CPU. So it is with models that may choose rows out of sight and
    with the first samples of small batches. `expected`: the number of batches, where it is known.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        objective: Objective,
        cotangents: Cotangents,
        seed: int,
        expected: int | None = None,
    ) -> None:
        super().__init__(model, parameters, objective, cotangents, seed)
        self.expected = expected
        self._patient = False  # waits for each comparison
        self._precise: bool | None = None  # compares gradients without TF32; not known yet
        self._queued: list[_Queued] = []
        self._light: list[Kept] = []  # without rows
        self._since = 0  # since the last comparison

    @property
    def shows_at_the_end(self) -> bool:  # type: ignore[override]
        return not self._patient

    def queues(self, samples: int) -> bool:
        return not (self._patient or self.irregular) and (samples > FIRST or self._drawn >= FIRST)

    @property
    def slot(self) -> int:
        used = {kept.slot for kept in (*self._waiting, *(kept for queued in self._queued for kept in queued.whole))}
        return next(number for number in itertools.count() if number not in used)

    def begin(self) -> None:
        super().begin()
        self._queued.clear()
        self._light.clear()
        self._since, self._patient = 0, True

    def draw(self, samples: int, entries: int = 0) -> list[int]:
        if not self.queues(samples):
            return super().draw(samples, entries)
        count = min(samples, 2 if self.expected is None else max(1, min(DRAWN // 2, DRAWN // max(1, self.expected))))
        return [int(row) for row in self.generator.choice(samples, count, replace=False)]

    def add(self, kept: Kept, plan: Plan, samples: int) -> None:
        if not self.queues(samples):
            self._queue(plan)
            return super().add(kept, plan, samples)
        if self._waiting and not self._waiting[0].joins(kept):
            self._queue(plan)
        self._drawn += len(kept)
        self._since += 1
        if self._precise is None:
            self._precise = self._coarse(kept.logits) and _noisy.get(self.model) == self._state(plan)
        one = max(1, kept.bytes // len(kept))  # with the batch, which is held for doubts
        rows = max(HELD_BYTES // one, samples // (2 * SHARE))
        most = max(1, (min(EXACTLY, rows) if self._precise else rows) // len(kept))  # batches with rows
        if len(self._waiting) < most:
            self._waiting.append(kept)
        else:
            place = int(self.generator.integers(self._since))
            if place < most:  # each batch since the last comparison has the same chance
                self._waiting[place], kept = kept, self._waiting[place]
            self._light.append(kept.without_parts())
        limit = min(HELD_PRECISELY, max(HELD_BYTES // one, samples // 2))
        if not self._precise:
            limit = min(COARSE if self._coarse(kept.logits) else HELD, max(HELD_BYTES // one, samples // SHARE))
        if sum(map(len, (*self._waiting, *self._light))) >= limit:
            self._queue(plan)

    def settle(self, plan: Plan) -> None:
        """Compare all samples that wait, and read all comparisons."""
        if self._since:
            self._queue(plan)
        while self._queued:
            self._read(self._queued.pop(0), plan)
        super().settle(plan)

    def _queue(self, plan: Plan) -> None:
        if not self._since:
            return
        whole, light = self._waiting, self._light
        rows = sum(map(len, whole))
        weights = self.generator.normal(size=rows + sum(map(len, light)))
        weights[rows:] = 0  # their gradients are not compared
        comparison = Comparison([*whole, *light], plan, sent(torch.from_numpy(weights), whole[0].logits.device))
        with known_labels():
            comparison.apart = self._losses_elsewhere(comparison, [*whole, *light])
        self._take_memory(4 * sum(kept.bytes for kept in whole))
        unread = self._begun(comparison, names=() if self._precise else None)
        exact = self._begun_exactly(whole, comparison.weights[:rows], plan) if self._precise else None
        self._queued.append(_Queued(whole, comparison, unread, exact, self._alone(whole[-1])))
        self._waiting, self._light, self._since = [], [], 0  # only now: what runs out of memory is tried again
        if len(self._queued) > 1:  # the device has long done it
            self._read(self._queued.pop(0), plan)

    def _losses_elsewhere(self, comparison: Comparison, group: list[Kept]) -> list[Pair]:
        """The cotangents of drawn samples beside those that their losses have among others of the comparison, and of some alone."""
        noise, numbers, pairs = torch.cat([kept.noise for kept in group]), [kept.number for kept in group for _ in range(len(kept))], []
        order = torch.from_numpy(self.generator.permutation(len(numbers)))
        size = in_other_parity(len(numbers), batch_size(group[0].batch))
        for rows in (*order.split(size), *(order[: LOSSES if size > 1 else 0].split(1))):
            there = sent(rows, comparison.logits.device)
            samples, outputs = take(comparison.samples, there), comparison.logits[there]
            passes = self.cotangents(outputs, self.objective.targets(samples), noise[there])
            together = {number: passes[number] for number in {numbers[row] for row in rows.tolist()}}  # computed when they are indexed
            for place, row in enumerate(rows.tolist()):
                pairs.append((comparison.cotangents[row : row + 1], together[numbers[row]][place : place + 1]))
        return pairs

    def _take_memory(self, size: int) -> None:
        """For the next comparison, at once: piece by piece it takes longer than the comparison."""
        if self._device.type == "cuda":
            with suppress(torch.OutOfMemoryError):
                torch.empty(min(MEMORY_BYTES, size), dtype=torch.uint8, device=self._device)

    def _begun(self, comparison: Comparison, names: Sequence[str] | None = None) -> Unread:
        """In the memory format of the planned pass, unless the model does not take that."""
        given, form = (self.model, self.parameters, self.objective), in_channels_last(comparison.samples)
        if form is not None:
            try:
                return comparison.begun(*given, form, names, order=2)
            except Exception as error:
                if out_of_memory(error):
                    raise
        return comparison.begun(*given, names=names, order=2)

    def _begun_exactly(self, whole: list[Kept], weights: Tensor, plan: Plan) -> _Exact:
        """By the plan and plainly, and what their batches' own passes gave beside it."""
        comparison = Comparison(whole, plan, weights)
        unread, attributed = self._begun_precisely(comparison, plan), comparison.attributed
        pairs = [(attributed[name], value) for name, value in unread.gradients.items() if name in attributed]
        return _Exact(unread, largest_of(pairs, order=2))

    def _begun_precisely(self, comparison: Comparison, plan: Plan) -> Unread:
        with tf32.switched_off():
            return self._begun(comparison.planned_again(self.model, self.parameters, plan, self.objective))

    def tolerated(self, tensor: Tensor) -> float:
        """Of gradients. A ReLU that flips by rounding to TF32 changes the norm of one by some percent; a sample that is not itself, of
        sixteen, by a quarter."""
        return allowed(tensor) if self._coarse(tensor) and not self._patient else super().tolerated(tensor)

    def _state(self, plan: Plan) -> int:
        """What the finding that TF32 hides everything is of: the plan, and the weights as far as torch counts what is written to them."""
        weights = tuple((id(value), value._version) for value in self.parameters.values())
        return hash((tuple(plan.layouts.items()), tuple(plan.batched), tuple(plan.idle), weights))

    def _coarse(self, tensor: Tensor) -> bool:
        return tensor.dtype != torch.float64 and allowed(tensor) > ROUNDED

    def _alone(self, kept: Kept) -> Tensor:
        together = kept.logits[:1]
        alone = self.logits_of(take(kept.samples, slice(0, 1)))
        same = alone.shape == together.shape
        return largest_of([unmasked(together, alone)]) if same else torch.tensor([torch.inf, 1.0], dtype=torch.float64)

    def _read(self, queued: _Queued, plan: Plan) -> None:
        logits, of_logits = queued.comparison.logits, super().tolerated
        found = queued.unread.read(self.tolerated, of_logits)
        difference, size = queued.alone.tolist()
        if found.together:
            raise Revised(set())
        if not (difference < of_logits(logits) * size or difference == 0):
            if not (self._coarse(logits) and self._the_same_alone(queued.whole[-1])):
                raise Revised(set())
            self.clearances += 1
        if queued.exact is not None:
            found = queued.exact.unread.read(_precisely, allowed)
            if not queued.exact.own_agree:
                return self._compare(queued.whole, plan, again=False)
        self._note(found, queued.whole)
        if not found.wrong:
            return
        holds = self._together_precisely if self._precise else self._holds_precisely  # as later comparisons, once that is known
        if self._coarse(logits) and queued.exact is None and holds(queued, plan, found):
            self._precise = True
            _noisy[self.model] = self._state(plan)
            self.clearances += 1
            self.doubts.settled[BY_PRECISION] += 1
            self.confirmed |= found.wrong
            return
        self._compare(queued.whole, plan, again=False)

    def _the_same_alone(self, kept: Kept) -> bool:
        """Whether a sample of this batch has the logits that it has alone, without TF32."""
        with tf32.switched_off():
            together, alone = self.logits_of(kept.batch)[kept.rows[:1]], self.logits_of(take(kept.samples, slice(0, 1)))
        return output_error(together, alone) < tolerance(alone) / 10

    def _together_precisely(self, queued: _Queued, plan: Plan, found: Differences) -> bool:
        """Whether the plan gives the gradients of a plain pass without TF32 to all drawn samples together."""
        try:
            return found.largest <= NOISY and not self._begun_precisely(queued.comparison, plan).read(_precisely, allowed)
        except Exception:  # settled as on the CPU
            return False

    def _holds_precisely(self, queued: _Queued, plan: Plan, found: Differences) -> bool:
        """Whether the plan gives the gradients of a plain pass without TF32: to all drawn samples together, and to those of one batch
        beside half of the others there. What is left is put down to TF32, if a plain pass with it is off as far."""
        if found.largest > NOISY:
            return False
        one = queued.whole[int(self.generator.integers(len(queued.whole)))]
        batch, rows = in_smaller_company(one.batch, one.rows)
        weights = sent(torch.from_numpy(self.generator.normal(size=len(rows))), rows.device)
        try:
            together = self._begun_precisely(queued.comparison, plan)
            with tf32.switched_off():
                kept = keep(self.model, self.parameters, plan, batch, rows, self.objective, random_like)
                beside = self._begun(Comparison([kept], plan, weights))
                exact = beside.read(_precisely, lambda logits: tolerance(logits) / 10)
        except Exception:  # out of memory, or used in another way: settled as on the CPU
            return False
        if exact or together.read(_precisely, allowed):
            return False
        own, plain = (_off(values, together.gradients) for values in (queued.comparison.attributed, queued.unread.gradients))
        return own <= ALIKE * plain


def forget() -> None:
    """As if the process had met no model."""
    _noisy.clear()


def _precisely(tensor: Tensor) -> float:
    return PRECISE


def _off(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """How far these are from the exact ones, over all parameters: the root of the summed squares of relative norms."""
    sizes = as_pairs(largest_of([(value, exact[name]) for name, value in gradients.items() if name in exact], order=2))
    return math.sqrt(sum((difference / size) ** 2 for difference, size in sizes if size))
