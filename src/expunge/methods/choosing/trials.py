"""Try settings in turn on one model, from the original weights each time, and keep the best."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from expunge import fisher
from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.errors import DivergedError, InputError, ModelError, NoEffectWarning
from expunge.methods.choosing.budget import MARGIN, Budget
from expunge.methods.choosing.choice import Tried
from expunge.methods.choosing.judging import Numbers, Verdict, check_teacher
from expunge.methods.choosing.rates import Pace, Weights
from expunge.methods.choosing.rungs import STRONGEST, Rung, all_fresh, left
from expunge.methods.choosing.situation import Situation
from expunge.methods.context import Method, Run
from expunge.runtime.display import counted
from expunge.runtime.progress import announce
from expunge.training.keeping import clock

MANY_WRONG = 0.2  # of all data: from here on wrong labels have spoilt what the network teaches
DIVERGED = "diverged"
BROKEN = 0.1  # of accuracy: a network that lost more is of less use than one that did not forget


@dataclass(frozen=True)
class Result:
    """A setting that was tried, the weights it came to, and what is recorded of it."""

    rung: Rung
    label: str
    method: Method
    numbers: Numbers
    verdict: Verdict
    patch: Patch | None
    weights: Weights
    records: Any


class Trials:
    """`results` are the last and the best so far, `tried` all, `notes` what else there is to tell."""

    def __init__(self, model: nn.Module, forget: Data, situation: Situation, run: Run, budget: Budget, seed: int) -> None:
        self.model, self.forget, self.situation, self.run, self.budget, self.seed = model, forget, situation, run, budget, seed
        self.results: list[Result] = []
        self.tried: list[Tried] = []
        self.notes: list[str] = []
        self.pass_seconds: dict[str, float] = {}  # by the kind of Fisher information
        self.impossible = False  # for modules that cannot be given fresh weights
        started = clock()
        self.start, self.before = Weights(model), situation.judge.measure(model)
        self.measuring = clock() - started
        check_teacher(self.before, situation.judge.guard_samples, self.outputs)

    @property
    def outputs(self) -> int:
        assert self.run.logits is not None  # `unlearn` has them
        return self.run.logits[1]

    def climb(self, rungs: list[Rung], pace: Pace) -> None:
        """Try settings; what a trial showed decides which of the others are left."""
        rungs = list(rungs)
        while rungs:
            rung = rungs.pop(0)
            epochs = self._epochs(rung)
            if epochs is None:
                continue
            result = self._attempt(rung, pace, epochs)
            if self._collapsed(result):
                pace, slower = replace(pace, peak=pace.peak / 3), self._epochs(rung)
                result = None if slower is None else self._attempt(rung, pace, slower)
            if result is None:
                rungs = [other for other in rungs if other.label != rung.label]
                continue
            rungs = left(rungs, rung, result.verdict)
            if self._spoilt(result):
                self.notes.append("the network had only learnt these labels by heart, and they are many: its answers may be spoilt")
                rungs = [all_fresh(self.situation, "all weights fresh: labels that are wrong and many have spoilt the others")]

    def best(self) -> Result:
        """Most goals met, of these those that forgot, or forgot most, of these the most accurate; one that broke the rest where all did."""
        if not self.results:
            results = "; ".join(tried.result for tried in self.tried)
            if self.tried and not self.impossible:
                raise DivergedError(f"nothing that was tried stayed finite; give a lower rate, or a method: {results}")
            raise InputError("method", "must be given, for nothing that was tried works here", results)

        def rank(result: Result) -> tuple[bool, int, bool, float, float]:
            kept, forgotten = result.verdict.kept is not False, result.verdict.forgotten is not False
            accuracy = 1.0 if result.numbers.accuracy is None else result.numbers.accuracy
            broken = not kept and (self.before.accuracy or 0.0) - accuracy > max(BROKEN, 2 * self.situation.judge.max_drop)
            known = result.numbers.forget if result.numbers.attack is None else result.numbers.attack
            left = 0.0 if forgotten else round(known, 2)
            return (False, 0, False, 0.0, accuracy) if broken else (True, kept + forgotten, forgotten, -left, accuracy)

        return max(self.results, key=rank)

    def take(self, result: Result) -> None:
        """Give the model the weights of this one, and the history its records."""
        result.weights.restore(self.model)
        self.run.put_records(result.records)

    def _epochs(self, rung: Rung) -> int | None:
        """As many as the budget allows; None where that is too few for a trial: half of them, or one for the first."""
        if not rung.epochs:
            return 0
        if rung.passes and self.budget.seconds is not None:
            self.budget.pass_seconds = self.pass_seconds[rung.fisher] = self.pass_seconds.get(rung.fisher) or self._pass_seconds(rung)
        room = self.budget.epochs_left(rung.passes, self.measuring)
        if room >= rung.epochs:
            return rung.epochs
        if room >= (rung.epochs / 2 if self.results or rung.passes else 1):
            return math.floor(room)
        if not self.tried and not rung.passes and self.budget.seconds is not None:
            rule = f"must be about {self.budget.needed(room):.2g} at least, for one pass over the remain data"
            raise InputError("seconds", rule, self.budget.seconds)
        told = "the budget left no room for other settings"
        self.notes += [] if told in self.notes else [told]
        return None

    def _pass_seconds(self, rung: Rung) -> float:
        """Of a Fisher pass over the remain data, from one batch. Some kinds take as many backward passes as there are classes."""
        started = clock()
        batch = next(iter(self.run.batches(self.situation.remain, "remain")))
        fisher.diagonal(self.model, [batch], kind=rung.fisher, objective=self.run.objective)
        return MARGIN * (clock() - started) * max(1.0, self.situation.remain_samples / self.run.batch_size)

    def _attempt(self, rung: Rung, pace: Pace, epochs: int) -> Result | None:
        started, judge = clock(), self.situation.judge
        method = rung.build(pace.tuning(epochs, self.situation.batch_size, self.seed) if epochs else None)
        label = f"{rung.label}, {counted(epochs, 'epoch')}, rate {pace}" if epochs else rung.label
        announce(f"trying {label}", self.run.progress)
        self.run.take_records()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # a mask that is too small is seen by what it did
                patch = method(self.model, self.forget, self.situation.remain, self.run)
            if rung.resets and patch is not None and not len(patch):
                raise ModelError("no weights are in modules that can be given fresh ones")
            self.run.begin()
            numbers = judge.measure(self.model)
        except (ModelError, DivergedError, InputError) as error:
            if isinstance(error, InputError) and not rung.optional:
                raise
            diverged = isinstance(error, DivergedError)
            epochs = max(self.run.epochs, default=0) + diverged  # those that were begun
            self.impossible = self.impossible or (rung.resets and not diverged)
            self._note(label, epochs, started, None, f"{DIVERGED if diverged else 'not possible'}: {error}")
            self.run.take_records()
            return None
        else:
            verdict = judge.verdict(numbers, self.before, rung.reads_forget, rung.strength == STRONGEST)
            self._note(label, epochs, started, numbers, "; ".join(verdict.missing) or "goal met")
            result = Result(rung, label, method, numbers, verdict, patch, Weights(self.model), self.run.take_records())
            self.results = [*([self.best()] if self.results else []), result]  # no more weights than needed are kept
            return result
        finally:
            self.budget.spend(rung.passes + epochs)
            self.start.restore(self.model)

    def _note(self, label: str, epochs: int, started: float, numbers: Numbers | None, result: str) -> None:
        accuracy, forget, attack = (None,) * 3 if numbers is None else (numbers.accuracy, numbers.forget, numbers.attack)
        self.tried.append(Tried(label, epochs, clock() - started, accuracy, forget, attack, result))

    def _collapsed(self, result: Result | None) -> bool:
        """Whether the rate was too large: training diverged, or half the accuracy is gone."""
        if result is None:
            return self.tried[-1].result.startswith(DIVERGED)
        numbers = result.numbers
        return bool(result.rung.resets and numbers.accuracy is not None and numbers.accuracy < (self.before.accuracy or 0) / 2)

    def _spoilt(self, result: Result) -> bool:
        many = self.situation.share >= MANY_WRONG and not self.situation.few
        return many and result.rung.resets and result.rung.strength < STRONGEST and self.situation.judge.are_harder(result.numbers)
