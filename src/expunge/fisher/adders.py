"""Add up the squared gradients of batches: of each sample by a plan that is confirmed as it is followed, or of whole batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy
import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, device_of, take
from expunge.data.calling import out_of_memory
from expunge.data.objective import Batch, Objective
from expunge.errors import ExpungeError
from expunge.fisher import kinds
from expunge.fisher.adding import Totals
from expunge.fisher.batchwise import batch_squares
from expunge.fisher.closed_forms.drawn import Drawn, Part
from expunge.fisher.closed_forms.early import Early
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.company import Alone
from expunge.fisher.confirming import FIRST, Confirmation, Revised, Unfounded, waiting_at_most
from expunge.fisher.familiar import FamiliarStep
from expunge.fisher.fitting import Fitting
from expunge.fisher.linearity import check_linear
from expunge.fisher.planned import Step, kept_of, picked, planned_pass
from expunge.fisher.planning.description import warn_if_slow
from expunge.fisher.planning.plan import Plan
from expunge.fisher.planning.survey import obvious_plan, survey
from expunge.fisher.queueing import QueuedConfirmation
from expunge.fisher.samples import Squares, batched, looped
from expunge.fisher.showing import samples_with_gradient
from expunge.fisher.steadiness import Steadiness
from expunge.runtime.cuda_graphs import GraphedStep, Result
from expunge.runtime.modes import hooked
from expunge.runtime.nested import tensors
from expunge.runtime.transfers import sent

CONFIRMED_ON = ("cpu", "cuda")


class Batchwise(Totals):
    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        super().__init__(model, parameters, objective)
        step = partial(batch_squares, model, parameters, objective=objective)
        self.step = _graphed(step) if device_of(model).type == "cuda" and not hooked(model) else step

    def add(self, batch: Batch) -> None:
        self.commit(self.step(batch), 1)


class Samplewise(Totals):
    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        objective: Objective,
        kind: str,
        draws: int,
        seed: int,
        expected: int | None,  # batches
        plan: Plan | None,
    ) -> None:
        super().__init__(model, parameters, objective)
        self.cotangents, self.scales = kinds.of_kind(kind, objective), kind != "empirical"
        self.draws, self.seed = draws if kind == "sampled" else 0, int(seed)
        self.generator = numpy.random.Generator(numpy.random.Philox(self.seed))
        self.confirms = (place := device_of(model).type) in CONFIRMED_ON
        self.confirmation = _confirmation(place, model, parameters, objective, self.cotangents, self.seed, expected)
        self.steadiness = Steadiness(model, parameters, objective)
        self.several = expected != 1  # batches, as far as is known: to capture a graph for one would be in vain
        self.plan = plan
        self.surveys = False  # at once: an obvious plan did not hold
        self.revised = False  # once already
        self.warned = False  # that it is slow
        self.begun = False
        self.scratch = Scratch()  # of the step
        self.adds_early, self.early = place == "cpu", Early({})  # of the batch that is added; a CUDA graph writes to memory of its own
        self.step: Step | None = None  # follows the plan; keeps memory from batch to batch
        self.logits: torch.Size | None = None  # of the last batch
        self.fitting = Fitting()

    def add(self, batch: Batch) -> None:
        samples = batch_size(batch)
        noise = kinds.uniform_noise(self.generator, samples, self.draws).to(tensors(batch)[0].device)

        def add(rows: slice) -> None:
            part, drawn = (batch, noise) if rows.stop - rows.start == samples else (take(batch, rows), noise[rows])
            self.early = Early({})
            try:
                self.commit(self.squares(part, drawn), rows.stop - rows.start)
            except (ExpungeError, Revised):
                raise
            except Exception as error:  # out of memory, say: these samples must not be added again
                if self.early.added:
                    raise self.not_early() from error
                raise

        self.fitting.add(slice(0, samples), add, self.free)

    def not_early(self) -> Revised:
        """What is raised where a batch has to be computed again, though some of its totals were added: start again, and hold them all."""
        self.adds_early = False
        return Revised(set())

    def early_sums(self) -> dict[str, Tensor]:
        """The sums to which this batch's totals may be added in its pass: of confirmed parameters, since others are looked at after it."""
        if not self.adds_early or self.revised:
            return {}
        return {name: self.sums[name] for name in self.plan_now.layouts if name in self.sums and name in self.confirmation.confirmed}

    def free(self) -> None:
        self.step = None

    def finish(self) -> None:
        if self.plan is None:
            return
        self.confirmation.settle(self.plan)
        if self.confirms and self.confirmation.shows_at_the_end:
            untold = self.untold(self.sums)
            if untold and (_not_zero(untold, self.sums) or self.confirmation.faint.intersection(untold)):
                raise Revised(set())
        self.warn()

    def untold(self, squares: Squares) -> list[str]:
        """The parameters of which no drawn sample had a gradient yet."""
        return [name for name in squares if name not in self.confirmation.confirmed and name not in self.plan_now.looped]

    def warn(self) -> None:
        """Once per call, where the plan is slow."""
        if not self.warned and self.plan is not None:
            self.warned = warn_if_slow(self.plan, list(self.parameters))

    def restart(self, names: set[str]) -> None:
        """The named parameters go one sample at a time; all of them, where that was not the end of it."""
        super().restart(names)
        self.step, self.logits = None, None
        if self.plan_now.surveyed:
            self.plan_now.revise(set(self.parameters) if self.revised else names)
            self.revised = self.revised or bool(names)
        else:
            self.plan, self.surveys = None, True
        self.generator = numpy.random.Generator(numpy.random.Philox(self.seed))
        self.confirmation.begin()

    def squares(self, batch: Batch, noise: Tensor) -> Squares:
        samples = batch_size(batch)
        if self.scales and not self.begun:
            check_linear(self.model, self.parameters, batch, self.objective)
        self.begun = True
        if samples == 1:  # one sample is its own definition
            before = self.steadiness.now()
            result = self.by(Plan())((batch, noise, noise.new_empty(0, dtype=torch.int64), None, 0))
            self.check_losses(batch, result.logits)
            if self.confirms:
                self.steadiness.check(batch, before)
            return looped(self.model, list(self.parameters), batch, result.cotangents, self.objective)
        if self.plan is None and self.confirms and not self.surveys:
            self.plan = obvious_plan(self.model, self.parameters, batch, self.objective)
        if self.plan is None:
            self.plan = survey(self.model, self.parameters, batch, self.objective)
            self.warn()
        try:
            return self.confirmed(batch, noise)
        except Unfounded:
            if self.count:  # other samples were added by this plan
                raise
        self.plan, self.step, self.surveys = None, None, True
        return self.squares(batch, noise)

    def confirmed(self, batch: Batch, noise: Tensor) -> Squares:
        """The squares of a batch by the plan, and what is confirmed of it at once."""
        samples = batch_size(batch)
        if not self.confirms:
            return self.planned(batch, noise, [])
        self.confirmation.irregular |= self.plan_now.mixes
        self.early = Early(self.early_sums())
        squares = self.planned(batch, noise, self.confirmation.draw(samples, self.plan_now.entries), self.early)
        if self.confirmation.queues(samples):
            return squares
        untold = self.untold(squares)
        active = self.confirmation.beyond_rounding(_not_zero(untold, squares), squares) if untold else []
        if active := [*active, *(name for name in untold if name in self.confirmation.faint and name not in active)]:
            squares = {name: square.clone() for name, square in squares.items()}  # the next pass writes over them
            self.confirm(active, squares, batch, noise)
        return squares

    def check_losses(self, batch: Batch, logits: Tensor) -> None:
        if self.logits is None and not self.scales:
            kinds.check_losses_apart(self.parameters, logits, batch, self.objective)

    def confirm(self, names: Sequence[str], squares: Squares, batch: Batch, noise: Tensor) -> None:
        """Compare samples that have a gradient of these parameters: none that was drawn so far has."""
        having = samples_with_gradient(self.model, self.parameters, names, batch, self.objective)
        if unfounded := set(names).difference(*having.values()):
            raise Revised(unfounded)
        self.confirmation.settle(self.plan_now)
        for name in names:  # it was rounding in other batches
            self.confirmation.rounding.pop(name, None)
        try:
            for index, self.confirmation.sought in having.items():
                self.planned(batch, noise, [index])
                self.confirmation.settle(self.plan_now)
        finally:
            self.confirmation.sought = set()
        if unshown := set(names).difference(self.confirmation.confirmed, self.confirmation.rounding, self.plan_now.looped):
            raise Revised(unshown)
        self.confirmation.note_rounding(names, squares)

    @property
    def plan_now(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def planned(self, batch: Batch, noise: Tensor, drawn: list[int], early: Early | None = None) -> Squares:
        """The squares of a batch by the plan, which is changed where it does not hold; the drawn samples are passed on to be compared.

        Without those that were added `early`.
        """
        plan = self.plan_now
        if self.step is None:
            captured = tensors(batch)[0].is_cuda and self.several and not (plan.batched or plan.looped or hooked(self.model))
            step = self.by(plan, self.pick(batch, noise))
            self.step = FamiliarStep(step, plan, self.settings()) if captured else step
        logits = plan.logits if self.logits is None and isinstance(self.step, FamiliarStep) else self.logits
        if logits is not None and not (self.labels is not None and self.labels.inside(logits)):
            self.objective.check_batch(logits, batch)  # a CUDA graph cannot
        rows, before = sent(torch.tensor(drawn, dtype=torch.int64), noise.device), self.steadiness.now()
        turn, slot = self.confirmation.turn(len(noise)), 0 if rows.is_cuda else self.confirmation.slot
        self.scratch.add_early(early)
        added = set[str]() if early is None else early.added
        given, audit = (batch, noise, rows, turn, slot), self.confirmation.audit(plan, len(noise)) if self.confirms else None
        try:
            result = self.step(given) if audit is None else self.step(given, audit)
        except Exception as error:
            if out_of_memory(error) or not plan.layouts or added:
                raise
            if not plan.surveyed:
                raise Unfounded from error
            self.by(Plan())(given)  # the error of the plain model, where it has one
            plan.revise(set(self.parameters))
            self.step = None
            return self.planned(batch, noise, drawn)
        self.check_losses(batch, result.logits)
        self.logits = result.logits.shape
        if added and (result.unexpected or (result.reads and not self.confirmation.irregular)):
            raise self.not_early()
        if not plan.surveyed and (result.unexpected or result.wrong or result.silent):
            raise Unfounded
        if result.unexpected:
            plan.revise(result.unexpected)
            self.step = None
            return self.planned(batch, noise, drawn)
        if result.wrong:  # what was added is not what the drawn samples are compared in
            raise Revised(result.wrong)
        if self.confirms and result.reads and not self.confirmation.irregular:
            self.confirmation.irregular = True
            return self.planned(batch, noise, self.confirmation.draw(batch_size(batch), plan.entries))
        if self.confirms:
            self.steadiness.check(batch, before)
            self.confirmation.in_other_company(batch, noise, result, plan.mixes)
            if plan.mixes and not plan.batched and not plan.looped:  # loops see every sample alone
                self.confirmation.among_few(batch, result.logits)
        squares, others, alone = dict(result.squares), list[Part](), Alone(result.logits)
        note = alone.note if self.confirms else None
        if plan.batched:
            try:
                drawn_parts = Drawn(rows, result.number)
                squares |= batched(self.model, plan.batched, batch, result.cotangents, self.objective, drawn=drawn_parts, note=note)
                others = drawn_parts.parts
            except Exception as error:  # what vmap cannot express for these data
                if out_of_memory(error):
                    raise
                plan.revise(set(plan.batched))
        if plan.looped:
            squares |= looped(self.model, plan.looped, batch, result.cotangents, self.objective, note=note)
        self.confirmation.against(alone, batch, plan)
        if (parts := [*result.parts, *others]) and not rows.is_cuda:
            entries = sum(part.inputs.numel() + part.slopes.numel() for part in parts) // len(rows)
            self.scratch.reserve(parts[0].slopes, entries // 2 + 1, waiting_at_most(batch_size(batch)) + 1)
        if self.confirms:
            self.confirmation.add(kept_of(batch, noise, rows, result, others, slot), plan, batch_size(batch))
        return squares

    def settings(self) -> tuple[object, ...]:
        """What a pass depends on beside its plan and its batch."""
        return self.scales, self.draws, frozenset((value.dtype, value.device) for value in self.parameters.values())

    def pick(self, batch: Batch, noise: Tensor) -> float:
        """Which of the cotangents drawn samples are compared at; on a GPU drawn here by their size for a few samples: graphs cannot."""
        pick = float(self.confirmation.generator.random())
        if not (noise.is_cuda and self.scales and self.confirms):
            return pick
        few, noise = take(batch, slice(0, FIRST)), noise[:FIRST]
        passes = self.cotangents(self.confirmation.logits_of(few), self.objective.targets(few), noise)
        return (picked(passes, torch.arange(len(noise), device=noise.device), pick) + 0.5) / len(passes)

    def by(self, plan: Plan, pick: float = 0.0) -> Step:
        """A pass by the closed forms of this plan, without a reference to this object: a cycle would keep its memory."""
        paths, self.scratch = self.confirmation.compared, Scratch()
        return partial(planned_pass, self.model, self.parameters, plan, self.cotangents, self.objective, self.scratch, pick, paths)


def _confirmation(
    place: str,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    objective: Objective,
    cotangents: kinds.Cotangents,
    seed: int,
    expected: int | None,
) -> Confirmation:
    if place == "cuda":
        return QueuedConfirmation(model, parameters, objective, cotangents, seed, expected)
    return Confirmation(model, parameters, objective, cotangents, seed)


def _not_zero(names: Sequence[str], squares: Squares) -> list[str]:
    flags = torch.stack([squares[name].any() for name in names]).tolist()  # the device is waited for once
    return [name for name, flag in zip(names, flags, strict=True) if flag]


def _graphed(step: Callable[..., Result]) -> Callable[..., Result]:
    """The same step, as a CUDA graph from the second batch of a shape on: launching kernels from Python takes longer than running them."""
    return GraphedStep(step, warm=1, lasting=False)
