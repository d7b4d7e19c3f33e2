"""Confirm, batch by batch, what a plan attributes to single samples: a few are drawn at random and compared with plain passes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy
import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, device_of, take
from expunge.data.objective import Batch, Objective
from expunge.errors import ModelError
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.closed_forms.drawn import TURNS
from expunge.fisher.company import (
    AGAIN,
    ASKED,
    COMPANY,
    LONE,
    LOSSES,
    Alone,
    check_losses,
    company,
    halves,
    has_fast_path,
    single,
    worst_output,
)
from expunge.fisher.comparing import Comparison, Differences, Kept, allowed, apart
from expunge.fisher.doubting import Doubts
from expunge.fisher.kinds import Cotangents
from expunge.fisher.planning.definition import COUPLED, NOT_FINITE, tolerance
from expunge.fisher.planning.passes import Pass
from expunge.fisher.planning.plan import Plan
from expunge.fisher.samples import fresh, is_usable, output_error
from expunge.runtime.transfers import sent

SHARE = {"cpu": 64, "cuda": 1024}  # of this many samples one is drawn; at least one of every batch
FIRST = 16  # samples of a call that are all drawn, since the plan is young; one where batches are larger, beside others' logits
WHOLE = 2  # comparisons of a call, of the first batch and of those that first wait together, that are of all parameters
KEPT_ENTRIES = 1 << 23  # of the operations' outputs, for samples that are drawn at once beyond the first
LOUDER = 100  # times the squares of rounding: a gradient of another kind
HELD = 64  # drawn samples at most that wait for a plain pass; it is shared, since one of a single sample costs several times its share


def waiting_at_most(samples: int) -> int:
    """How many drawn samples of batches of this size share a plain pass."""
    return max(1, min(HELD, samples // 4))


class Revised(Exception):
    """The plan does not hold for these parameters: it must be changed, and whatever was added up by it is void."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


class Unfounded(Revised):
    """A plan that nothing has shown yet does not hold: a survey must make another."""

    def __init__(self) -> None:
        super().__init__(set())


class Confirmation:
    """Draws samples, and compares their logits, the gradients of their losses and those of their weights with plain passes.

    With weights r drawn at random, Σ_s r_s · gradient_s as the plan attributes it must be the gradient of Σ_s r_s · loss_s: a row that is
    counted to another sample, or belongs to two, carries the wrong weight. One plain pass serves the drawn samples of several batches.
    `confirmed`: the parameters that had a gradient in such a comparison; where there is none, nothing is shown.
    """

    shows_at_the_end = False  # which parameters are not confirmed; here after every batch

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective, cotangents: Cotangents, seed: int
    ) -> None:
        self.model, self.parameters, self.objective, self.cotangents = model, parameters, objective, cotangents
        self.doubts = Doubts(model, parameters, objective)
        self.generator = numpy.random.Generator(numpy.random.Philox(key=[seed % 2**64, 1]))  # apart from all others
        self.confirmed: set[str] = set()
        self._exactly: set[str] = set()  # those of them that were in float64
        self.doubtful: set[str] = set()  # parameters whose gradient, of some samples, agrees as rounding alone
        self.faint: set[str] = set()  # these, and those that are off by no more than a unit of it
        self.rounding: dict[str, float] = {}  # the largest square of parameters of which samples had nothing else, in float64 either
        self.irregular = False  # the model may move rows from sample to sample, or choose them out of sight
        self.sought: set[str] = set()  # parameters whose largest gradient a sample has: it is compared in all, whosever turn it is
        self.clearances = 0  # how often rounding alone gave the alarm
        self._drawn = self._batches = self._settled = 0
        self._accompanied, self._fast_path = False, has_fast_path(model)
        self._device = device_of(model)
        self._on_cuda = self._device.type == "cuda"
        self._waiting: list[Kept] = []
        self.compared: set[int] = set()  # the paths of passes

    def beyond_rounding(self, names: Sequence[str], squares: Mapping[str, Tensor]) -> list[str]:
        """Those of these parameters whose squares are not rounding alone, as far as their size tells."""
        return [name for name in names if name not in self.rounding or float(squares[name].max()) > LOUDER * self.rounding[name]]

    def note_rounding(self, names: Sequence[str], squares: Mapping[str, Tensor]) -> None:
        """Of the parameters that were found so in this batch, how large it is."""
        self.rounding |= {name: max(self.rounding[name], float(squares[name].max())) for name in names if name in self.rounding}

    def begin(self) -> None:
        """Start again, on the same data."""
        self.confirmed.clear()
        self._exactly.clear()
        self.doubtful.clear()
        self.faint.clear()
        self.rounding.clear()
        self._waiting.clear()
        self.compared.clear()
        self._drawn = self._batches = self._settled = 0

    def queues(self, samples: int) -> bool:
        """Whether what is compared of a batch of this size is waited for later."""
        return False

    def in_other_company(self, batch: Batch, noise: Tensor, result: Pass, mixes: bool) -> None:
        """Raise where losses, or logits, of some samples are other ones beside fewer samples or alone: in a call's first batch, and in all
        where the model `mixes` samples, reads or asks.

        A coupling of few samples shows in these, hardly in the one that is drawn. A GPU would have to wait; it does for all logits where
        the plain model may take a fast path.
        """
        if self._fast_path and not worst_output(result.logits, self.logits_of(batch)) < self.tolerated(result.logits):
            raise Revised({*self.parameters})
        if self._on_cuda:
            return
        samples, first = len(noise), not self._batches
        if len(result.cotangents) == 1:
            groups = [*halves(samples, result.logits.numel(), self.generator)[: 2 if first else 1]]  # both of the first batch
            groups += single(samples, LOSSES, self.generator) if first else []
            check_losses(self.cotangents, result.logits, result.cotangents[0], noise, batch, self.objective, groups)
        suspected = mixes or result.asks or result.reads
        if first or suspected:
            few = result.reads and samples <= FIRST  # a number read out of one sample may send all others another way
            for row in single(samples, samples if few else (ASKED if suspected else LONE) if first else AGAIN, self.generator):
                self._check_company(batch, result.logits, row)
        self._batches += 1
        if self._accompanied or len(noise) <= FIRST:  # small batches are drawn whole
            return
        self._accompanied = True
        self._check_company(batch, result.logits, company(len(noise), self.generator))

    def among_few(self, batch: Batch, logits: Tensor) -> None:
        """Raise where any sample has other logits beside few others."""
        samples = len(logits)
        for rows in torch.from_numpy(self.generator.permutation(samples)).split(max(1, min(COMPANY, samples // 2))):
            self._check_company(batch, logits, rows.to(logits.device))

    def _check_company(self, batch: Batch, logits: Tensor, rows: Tensor) -> None:
        if worst_output(logits[rows], self.logits_of(take(batch, rows))) < self.tolerated(logits):
            return
        with tf32.switched_off():  # whose rounding changes logits of deep networks by percents
            alone = torch.cat([self.logits_of(take(batch, row)) for row in rows.split(1)])
            if not worst_output(self.logits_of(batch)[rows], alone) < self.tolerated(alone):
                raise ModelError(COUPLED)

    def against(self, alone: Alone, batch: Batch, plan: Plan) -> None:
        """Raise where a sample has other logits alone; a loop has those of all of them, so that few samples are found, too."""
        if alone.error < self.tolerated(alone.together):
            return
        planned = {*plan.layouts, *plan.batched, *plan.idle}
        with tf32.switched_off():
            again = Alone(self.logits_of(batch))
            for row in range(len(again.together)):
                again.note(slice(row, row + 1), self.logits_of(take(batch, slice(row, row + 1))))
            if not again.error < self.tolerated(again.together):
                raise ModelError(COUPLED)
        if tolerance(alone.together) < allowed(alone.together) > alone.error:
            return  # as TF32 rounds
        raise Revised(planned) if planned else ModelError(COUPLED)

    def logits_of(self, batch: Batch) -> Tensor:
        """Those of the plain model."""
        with torch.enable_grad():  # torch has other ways without
            return self.objective.logits(self.model, fresh(batch)).detach()

    def draw(self, samples: int, entries: int = 0) -> list[int]:
        """The numbers of the samples of a batch to be kept; fewer where a sample has so many entries that all would take much memory.

        All of them where the model may move rows from sample to sample: rows that are another's may be those of few samples.
        """
        drawn = 0 if self._on_cuda and samples > FIRST else self._drawn  # as many every time: a CUDA graph is for one number
        fit = max(1, KEPT_ENTRIES // max(1, entries))
        young = min(FIRST if samples <= FIRST else 1, fit) - drawn
        share = samples // SHARE["cuda" if self._on_cuda else "cpu"]
        count = max(1, share, min(samples, young), min(samples, fit) if self.irregular else 0)
        return [int(row) for row in self.generator.choice(samples, count, replace=False)]

    @property
    def slot(self) -> int:
        """The first memory that no waiting sample is in."""
        used = {kept.slot for kept in self._waiting}
        return next(number for number in itertools.count() if number not in used)

    def turn(self, samples: int) -> int | None:
        """In which part of the parameters the samples of this batch are compared: in all while the plan is young, and in CUDA graphs."""
        whole = bool(self.sought) or self._young(samples) or self._settled < WHOLE or self._on_cuda or self.irregular
        return None if whole or len(self.parameters) < 2 * TURNS else self._settled % TURNS

    def audit(self, plan: Plan, samples: int) -> Audit | None:
        """What of the squares themselves is recomputed: of all parameters while the plan is young, then of one; not in CUDA graphs.

        Where nothing else has shown the plan and each launch counts, of one parameter for each form of an operation.
        """
        if not plan.layouts or (self._on_cuda and (plan.surveyed or not self._young(samples))):
            return None
        pick, names = float(self.generator.random()), list(plan.layouts)
        if self._on_cuda:
            return Audit(pick, once=True)
        return Audit(pick, None if self._young(samples) else names[int(self.generator.integers(len(names)))])

    def _young(self, samples: int) -> bool:
        return self._drawn < (FIRST // 2 if samples <= FIRST else 1)

    def add(self, kept: Kept, plan: Plan, samples: int) -> None:
        """Take over what a planned pass kept of its drawn samples; now and then the plain pass is made."""
        if self._waiting and not self._waiting[0].joins(kept):
            self.settle(plan)
        self._waiting.append(kept)
        self.compared.add(kept.path)
        limit = waiting_at_most(samples)
        if self._young(samples) or self.irregular or sum(map(len, self._waiting)) >= limit:
            self.settle(plan)
        self._drawn += len(kept)

    def settle(self, plan: Plan) -> None:
        """Compare all samples that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._settled += 1
        groups = [waiting]
        if len(waiting) == 1 and len(waiting[0]) > 1:  # of one batch: one goes alone, as the definition has it, others in other company
            few = batch_size(waiting[0].batch) <= FIRST
            if few and self._drawn < FIRST:
                self._check_logits_alone(waiting[0], plan)
            half = 1 + len(waiting[0]) // 2 if few else 1
            lone = range(LONE if self.irregular else 2)  # a hook, too, may ask about the batch
            edges = sorted({edge for edge in (*lone, half, len(waiting[0])) if edge <= len(waiting[0])})
            groups = [[waiting[0].cut(slice(*ends))] for ends in itertools.pairwise(edges)]
        for number, group in enumerate(groups):
            self._compare(group, plan, again=number > 0)

    def _compare(self, group: list[Kept], plan: Plan, again: bool) -> None:
        """`again`: other samples of this batch were just compared, so that a cheaper form of the plain pass will do where there is one."""
        weights = sent(torch.from_numpy(self.generator.normal(size=sum(map(len, group)))), group[0].logits.device)
        comparison = Comparison(group, plan, weights, apart(group, self.cotangents, self.objective))
        form = self.doubts.unflipped(comparison.samples) if again else None
        found = comparison.differences(self.model, self.parameters, self.objective, self.tolerated, form)
        self._note(found, group)
        if plan.surveyed and (faint := (found.faint & self.sought) - self.confirmed):
            for kept in group:
                exact = self.doubts.with_another_cotangent(kept, plan, found)
                self._blame(kept, plan, exact)
                self._note_exactly(exact, kept)
                self.rounding |= dict.fromkeys((faint & exact.faint) - self.confirmed, 0.0)
            self.doubtful -= self.rounding.keys()
            self.faint -= self.rounding.keys()
        if not found:
            return
        left = self.doubts.unexplained(comparison, group, plan, found, self.tolerated)
        for kept in left:
            exact = self.doubts.over_the_whole_batch(kept, plan, found)
            self._blame(kept, plan, exact)
            self._note_exactly(exact, kept)
        if len(left) < len(group):
            self.confirmed |= found.wrong
        self.clearances += 1

    def _note(self, found: Differences, group: Sequence[Kept]) -> None:
        """Confirm what is shown; no longer what agrees as rounding alone, where float64 did not show it."""
        shown = self._shown(found, group)
        self.faint |= found.faint
        self.doubtful |= found.doubtful - shown - self._exactly
        self.confirmed = (self.confirmed | shown) - self.doubtful

    def _note_exactly(self, found: Differences, kept: Kept) -> None:
        self._exactly |= self._shown(found, [kept])
        self.doubtful -= self._exactly
        self.confirmed |= self._exactly

    def _shown(self, found: Differences, group: Sequence[Kept]) -> set[str]:
        """The parameters that a comparison has shown: those with a faint gradient only where they are the bias of an operation whose weight
        is shown, as that of attention's keys."""
        return found.shown | {part.bias for kept in group for part in kept.parts if part.weight in found.shown and part.bias in found.faint}

    def _blame(self, kept: Kept, plan: Plan, found: Differences) -> None:
        """Raise, where something is wrong."""
        if found.together:
            self._explain(kept, plan)
            if not found.wrong:  # nothing is left that could be computed in another way
                raise ModelError(COUPLED)
        if found.wrong:
            raise Revised(found.wrong)

    def tolerated(self, tensor: Tensor) -> float:
        """Beyond it a difference is looked into in float64; each false alarm makes the next less likely."""
        largest = allowed(tensor)
        return largest if tensor.dtype == torch.float64 else min(largest, largest / 10 * 4**self.clearances)

    def _check_logits_alone(self, kept: Kept, plan: Plan) -> None:
        """Raise, where a sample has other logits alone: a coupling through few samples (the largest, say) does not show in all company."""
        alone = self._logits_alone(kept)
        if not output_error(kept.logits, alone) < self.tolerated(alone):
            self._explain(kept, plan)
            raise Revised({*plan.layouts, *plan.batched, *plan.idle})

    def _logits_alone(self, kept: Kept) -> Tensor:
        return torch.cat([self.logits_of(take(kept.samples, slice(row, row + 1))) for row in range(len(kept))])

    def _explain(self, kept: Kept, plan: Plan) -> None:
        """Raise, where the model itself treats a sample in another way as its batch changes; else only the closed forms do."""
        alone, together = self._logits_alone(kept), self.logits_of(kept.batch)[kept.rows]
        if not is_usable(alone):
            raise ModelError(NOT_FINITE)
        if not output_error(together, alone) < allowed(together) / 10:
            raise ModelError(COUPLED)
