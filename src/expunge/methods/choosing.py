"""Choose a method by what there is, try settings in turn until the goal is met, and tell why."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from expunge import fisher
from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.errors import DivergedError, InputError, ModelError, NoEffectWarning
from expunge.methods.choice import Choice, Tried, brief
from expunge.methods.context import Method, Run
from expunge.methods.judging import Numbers, Verdict, check_teacher
from expunge.methods.rates import STEPS, Pace, Search, Weights, paces, search
from expunge.methods.rungs import MANY_WRONG, THIRD, Rung, by_heart, ladder, left, normalised_by_batch, without_reset
from expunge.methods.situation import Situation, seen
from expunge.runtime.progress import announce
from expunge.training.schedules import OneCycle
from expunge.training.tuning import Tuning
from expunge.validate import check_number, check_positive, check_seed, make_plain

GENTLE = 0.01  # the peak of the rate where remain data are few
SEARCHED = 0.25  # of the budget that the search for a rate may take
MARGIN = 1.2  # an epoch may take longer than the few steps that were timed


@dataclass(frozen=True)
class Choose:
    """Choose a method and its settings: try one after the other, from the original weights each, until one meets the goal.

    The goal: accuracy on held-out data (`validation`, else a part of the remain data that is never trained on) falls by no more than
    `max_drop`; of a class no label is left; samples look to the loss attack and by their accuracy like data that were never seen, which
    only `validation` can tell. Settings are those of results/trials: fresh weights in part of the network, distilled from the original;
    without remain data, or with few, a mask. `outcome.choice` tells what was chosen and why; where nothing met the goal, the best there
    was is returned, marked as such.

    `epochs`: passes over the remain data for everything that is tried; `seconds` by the clock. `rate`: the peak learning rate of the
    original training; None: a few steps at several rates decide.
    """

    epochs: float | None = None
    seconds: float | None = None
    max_drop: float = 0.02
    rate: float | None = None
    seed: int = 0

    takes_validation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_number("epochs", self.epochs, 1, rule="must be at least 1, a pass over the remain data, or None")
        if self.seconds is not None:
            check_number("seconds", self.seconds, 0, ends="()", rule="must be a positive number, or None")
        check_number("max_drop", self.max_drop, 0, 1, ends="[]", rule="must be a fraction in [0, 1]")
        if self.rate is not None:
            check_positive("rate", self.rate)
        check_seed("seed", self.seed)
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch | None:
        budget = Budget(self.epochs, self.seconds)
        situation = seen(forget, remain, run, self.max_drop, self.seed)
        trial = Trial(model, forget, situation, run, budget)
        pace, told = self._pace(model, forget, situation, run, budget)
        rungs = ladder(situation, _outputs(run))
        trial.climb(rungs, pace, self.seed)
        if not trial.results and situation.remain is not None:
            trial.climb(without_reset(situation), pace, self.seed)
        best = trial.best()
        trial.take(best)
        run.tell(best.method, _choice(best, trial, (*situation.told, *told)))
        return best.patch

    def _pace(self, model: nn.Module, forget: Data, situation: Situation, run: Run, budget: Budget) -> tuple[Pace, tuple[str, ...]]:
        """The rate to train at, and how it was found."""
        given = () if self.rate is None else (f"the rate {self.rate:g} was given",)
        if situation.remain is None:
            return Pace(GENTLE), ()
        if situation.few:
            return Pace(self.rate or GENTLE), given
        among = paces(self.rate, normalised_by_batch(model))
        timed = budget.seconds is not None
        steps = min(STEPS, situation.steps)
        if budget.epochs is not None and len(among) * steps / situation.steps > SEARCHED * budget.epochs:
            among = among[-1:] if self.rate is None and among[-1].adam else among[:1] if self.rate is not None else [Pace(0.03)]
            if not timed:
                return among[0], given or (f"no epochs to search for a rate: {among[0]} is a guess",)
            steps = min(steps, 4)
        found = search(
            model, forget, situation.remain, run, situation.judge, among, situation.batch_size, self.seed, THIRD,
            steps, enough=lambda spent: timed and spent > SEARCHED * (self.seconds or 0),
        )  # fmt: skip
        budget.note(found, situation)
        if not math.isfinite(found.losses[found.pace]):
            raise DivergedError(f"no learning rate of {', '.join(map(str, found.losses))} trains this network; give `rate`, or a method")
        tried = ", ".join(map(str, found.losses))
        if len(found.losses) == 1:
            return found.pace, given or (f"the rate {found.pace} is a guess",)
        return found.pace, (f"rate {found.pace} did best in {steps} steps each of {tried}",)


class Budget:
    """What is left of the epochs and the seconds; None is without end."""

    def __init__(self, epochs: float | None, seconds: float | None) -> None:
        self.epochs, self.seconds = epochs, seconds
        self.began = time.perf_counter()
        self.epoch_seconds = self.pass_seconds = 0.0

    def note(self, found: Search, situation: Situation) -> None:
        """Take what a search cost off the budget, and the cost of an epoch from it."""
        self.spend(found.steps / situation.steps)
        self.epoch_seconds = 0.0 if math.isinf(found.seconds) else MARGIN * found.seconds * situation.steps

    def spend(self, epochs: float) -> None:
        if self.epochs is not None:
            self.epochs = max(0.0, self.epochs - epochs)

    def epochs_for(self, passes: int, pass_seconds: float, measuring: float) -> float:
        """How many epochs can still be trained, beside other passes over the data."""
        by_epochs = math.inf if self.epochs is None else self.epochs - passes
        if self.seconds is None:
            return by_epochs
        left = self.seconds - (time.perf_counter() - self.began) - passes * pass_seconds - measuring
        by_seconds = left / self.epoch_seconds if self.epoch_seconds else (math.inf if left > 0 else 0.0)
        return min(by_epochs, by_seconds)


@dataclass(frozen=True)
class Result:
    """A setting that was tried, the weights it came to, and what is recorded of it."""

    rung: Rung
    method: Method
    numbers: Numbers
    verdict: Verdict
    patch: Patch | None
    weights: Weights
    records: Any


@dataclass
class Trial:
    """Tries settings on one model, from the original weights each time."""

    model: nn.Module
    forget: Data
    situation: Situation
    run: Run
    budget: Budget
    results: list[Result] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        started = time.perf_counter()
        self.start = Weights(self.model)
        self.before = self.situation.judge.measure(self.model)
        self.measuring = time.perf_counter() - started
        check_teacher(self.before, max(1, self.situation.judge.guard_samples), _outputs(self.run))

    def climb(self, rungs: list[Rung], pace: Pace, seed: int) -> None:
        """Try the settings in turn; what a trial showed decides which of them are left."""
        rungs = list(rungs)
        while rungs:
            rung = rungs.pop(0)
            epochs = self._epochs(rung)
            if epochs is None:
                if rung.passes and not self.results and rungs:
                    continue  # the next needs no pass beside training
                self.notes.append("the budget left no room to try more" if self.results else "")
                break
            result = self._attempt(rung, pace, epochs, seed)
            if result is None:
                pace = replace(pace, peak=pace.peak / 3) if self.tried[-1].result.startswith("diverged") else pace
                continue
            rungs = left(rungs, rung, result.verdict)
            if self._wrong_labels(result) and self.situation.share >= MANY_WRONG and rung.strength < 3 and not self.situation.few:
                self.notes.append("the network had only learnt these labels by heart, and they were many: its answers may be spoilt")
                rungs = [by_heart(self.situation)]

    def best(self) -> Result:
        """Most goals met, of these those that forgot, of these the most accurate."""
        if not self.results:
            raise InputError("method", "nothing could be tried; give a method", "; ".join(tried.result for tried in self.tried) or None)

        def rank(result: Result) -> tuple[int, bool, float]:
            verdict = result.verdict
            met = (verdict.kept is not False) + (verdict.forgotten is not False)
            return met, verdict.forgotten is not False, result.numbers.accuracy or 0.0

        return max(self.results, key=rank)

    def take(self, result: Result) -> None:
        """Give the model the weights of this one, and the history its records."""
        result.weights.restore(self.model)
        self.run.put_records(result.records)

    def _epochs(self, rung: Rung) -> int | None:
        """As many as the budget allows; None where that is too few to be worth a trial."""
        if not rung.epochs:
            return 0
        pass_seconds = self._pass_seconds() if rung.passes and self.budget.seconds is not None else 0.0
        room = self.budget.epochs_for(rung.passes, pass_seconds, self.measuring)
        least = 1 if not self.results else rung.epochs / 2
        if rung.passes and rung.epochs / 2 > room:
            return None
        if room < least:
            if not self.results and not rung.passes and self.budget.seconds is not None:
                needed = self.budget.seconds + (1 - room) * self.budget.epoch_seconds
                raise InputError("seconds", f"must be about {needed:.2g} at least, for one pass over the remain data", self.budget.seconds)
            return None
        return min(rung.epochs, math.floor(room)) if math.isfinite(room) else rung.epochs

    def _pass_seconds(self) -> float:
        """Of a Fisher pass over the remain data, from one batch."""
        if not self.budget.pass_seconds:
            started = time.perf_counter()
            batch = next(iter(self.run.batches(self.situation.remain, "remain")))
            fisher.diagonal(self.model, [batch], kind="expected", objective=self.run.objective)
            batches = self.situation.remain_samples / self.run.batch_size
            self.budget.pass_seconds = MARGIN * (time.perf_counter() - started) * max(1.0, batches)
        return self.budget.pass_seconds

    def _attempt(self, rung: Rung, pace: Pace, epochs: int, seed: int) -> Result | None:
        situation, started = self.situation, time.perf_counter()
        tuning = self._tuning(pace, epochs, seed)
        method = rung.build(tuning)
        announce(f"trying {brief(method)}", self.run.progress)
        self.run.take_records()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # a mask that is too small is seen by what it did
                patch = method(self.model, self.forget, situation.remain, self.run)
            self.run.begin()
            numbers = situation.judge.measure(self.model)
        except (ModelError, DivergedError) as error:
            self.start.restore(self.model)
            self.run.take_records()
            kind = "diverged" if isinstance(error, DivergedError) else "impossible"
            self._note(method, epochs, started, None, f"{kind}: {error}")
            return None
        finally:
            self.budget.spend(rung.passes + epochs)
        verdict = situation.judge.verdict(numbers, self.before, rung.reads_forget)
        self._note(method, epochs, started, numbers, "; ".join(verdict.missing) or "goal met")
        result = Result(rung, method, numbers, verdict, patch, Weights(self.model), self.run.take_records())
        self.results = [result] if not self.results else [result, self.best()]  # no more weights are kept than needed
        self.start.restore(self.model)
        return result

    def _tuning(self, pace: Pace, epochs: int, seed: int) -> Tuning | None:
        if not epochs:
            return None
        if self.situation.few:
            return Tuning(OneCycle(pace.peak, epochs), batch_size=self.situation.batch_size, seed=seed)
        return pace.tuning(epochs, self.situation.batch_size, seed)

    def _note(self, method: Method, epochs: int, started: float, numbers: Numbers | None, result: str) -> None:
        seconds = time.perf_counter() - started
        accuracy, forget, attack = (None,) * 3 if numbers is None else (numbers.accuracy, numbers.forget, numbers.attack)
        self.tried.append(Tried(brief(method), epochs, seconds, accuracy, forget, attack, result))

    def _wrong_labels(self, result: Result) -> bool:
        """Whether a network that does not know them by heart says other labels: far fewer are right than of the rest."""
        numbers = result.numbers
        known = self.situation.judge.kind == "samples" and self.before.forget > 0.5 and numbers.accuracy is not None
        spread = 3 * (0.25 / self.situation.judge.forget_samples) ** 0.5
        return known and numbers.forget + spread < (numbers.accuracy or 0) / 2


def _choice(best: Result, trial: Trial, told: tuple[str, ...]) -> Choice:
    others = len(trial.tried) - 1
    reasons = [*told, best.rung.why]
    if others:
        failed = [tried for tried in trial.tried if tried.method != brief(best.method)]
        reasons += [f"{tried.method} was tried: {tried.result}" for tried in failed]
    reasons += [note for note in trial.notes if note]
    verdict = best.verdict
    return Choice(repr(best.method), brief(best.method), tuple(reasons), verdict.met, verdict.missing, tuple(trial.tried))


def _outputs(run: Run) -> int:
    assert run.logits is not None
    return run.logits[1]
