"""List the settings that are worth a trial for what there is to unlearn, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from expunge.methods.choosing.judging import Verdict
from expunge.methods.choosing.situation import Situation
from expunge.methods.context import Method
from expunge.methods.masking import FisherMask
from expunge.methods.resetting import ByFisher, ResetAndDistil
from expunge.methods.sensitivity import MuMis
from expunge.training.distillation import Distillation
from expunge.training.tuning import Tuning

THIRD, TWO_THIRDS, ALL = 0.35, 0.67, 1.0  # of the depth, from the output
STEPS = 60  # per epoch of the trials, at least: small data take more epochs
STRONGEST = 3
FRESH_DECAY = 1e-3  # in trials the best for networks that are all fresh


@dataclass(frozen=True)
class Rung:
    """A setting to try. `strength` orders settings by how much they replace; `passes` are those over the remain data beside training.

    `build` makes the method of a tuning; `epochs` 0: nothing is trained on remain data. `resets`: some weights must get fresh values.
    `optional`: data that it cannot work on are no reason to stop.
    """

    label: str
    why: str
    strength: int
    epochs: int
    build: Callable[[Tuning | None], Method]
    reads_forget: bool = False
    passes: int = 0
    resets: bool = False
    optional: bool = False
    fisher: Literal["sampled", "batch", "empirical"] = "sampled"  # what a pass computes


def ladder(situation: Situation) -> list[Rung]:
    """In the order of trial. "Trials" are those on CIFAR-10 in results/trials/README.md and in the page on resetting."""
    if situation.remain_samples < 2:  # BatchNorm cannot train on one
        return _without_remain(situation)
    if situation.few:
        return _with_few(situation)
    return _classes(situation) if situation.judge.kind == "class" else _samples(situation)


def all_fresh(situation: Situation, why: str) -> Rung:
    def build(tuning: Tuning | None) -> Method:
        assert tuning is not None
        return ResetAndDistil(ALL, replace(tuning, weight_decay=max(tuning.weight_decay, FRESH_DECAY)))

    return Rung(f"ResetAndDistil({ALL:g})", why, STRONGEST, _epochs(10, situation), build, resets=True)


def without_reset(situation: Situation) -> list[Rung]:
    """For a network with modules that nothing can give fresh weights."""
    since = "since modules of this network cannot be given fresh weights (give them a method `reset_parameters`)"
    epochs = _epochs(5, situation)
    distilled = Rung(
        "ResetAndDistil(())", f"it is taught its own answers on remain data, {since}", 0, epochs, lambda tuning: _distilled((), tuning)
    )
    return [
        _mask(situation, 0.05, 1, epochs, f"weights that matter to the forget data are masked and the rest fine-tuned, {since}"),
        distilled,
    ]


def left(rungs: Sequence[Rung], tried: Rung, verdict: Verdict) -> list[Rung]:
    """The settings that may do better: stronger ones where it did not forget, gentler or longer ones where it did and lost the rest.

    Where it did neither: stronger ones, then gentler ones, which harm less at least.
    """
    stronger, gentler = ([rung for rung in rungs if sign * (rung.strength - tried.strength) > 0] for sign in (1, -1))
    if verdict.forgotten is False:
        return stronger if verdict.kept is not False else stronger + gentler
    if verdict.kept is False:
        longer = [rung for rung in rungs if rung.strength == tried.strength and rung.epochs > tried.epochs]
        return [rung for rung in rungs if rung in gentler or rung in longer]
    return []


def _classes(situation: Situation) -> list[Rung]:
    told = "in trials (ResNet20, CIFAR-10) it left about as little as retraining; an audit tells for yours"
    first = f"fresh weights by Fisher information: {told}"
    third = "fresh weights in the last third of the depth: in trials it kept most accuracy"
    by_fisher = Rung(
        "ResetAndDistil(ByFisher(0.6))",
        first,
        2,
        _epochs(5, situation),
        lambda tuning: _distilled(ByFisher(0.6), tuning),
        passes=2,
        resets=True,
    )
    rungs = [by_fisher] * situation.judge.per_sample + [_reset(THIRD, 5, 1, third, situation)]
    if situation.judge.unseen:
        rungs.append(_reset(THIRD, 10, 1, f"{third}; twice the epochs", situation))
    return [*rungs, all_fresh(situation, "all weights fresh: the most that can be done")]


def _samples(situation: Situation) -> list[Rung]:
    two = "fresh weights in the last two thirds: in trials they made samples look unseen"
    middle = _reset(TWO_THIRDS, 8, 2, two, situation)
    if not situation.judge.telling:
        return [middle]
    gentle = "fresh weights in the last third: in trials the least that made samples look unseen"
    rungs = [_reset(THIRD, 5, 1, gentle, situation), _reset(THIRD, 10, 1, f"{gentle}; twice the epochs", situation), middle]
    rungs.append(_reset(TWO_THIRDS, 16, 2, f"{two}; twice the epochs", situation))
    return [*rungs, all_fresh(situation, "all weights fresh: the most that can be done")]


def _without_remain(situation: Situation) -> list[Rung]:
    """From few weights to many; without anything to guard the rest no more than in the trials."""
    ratios = (0.001, 0.002, 0.005, 0.01, 0.02) if situation.judge.guard is not None else (0.001, 0.002, 0.005)
    what = "of the weights, those that matter most to the forget data, are masked; nothing is trained"
    return [_mask(situation, ratio, number, 0, f"{100 * ratio:g} % {what}") for number, ratio in enumerate(ratios)]


def on_forget_data(situation: Situation) -> list[Rung]:
    """For a class where no remain data are there and no mask will do."""
    why = "steps that lower how the forget data move their own logit, since no mask that was tried did"
    return [Rung("MuMis()", why, 0, 0, lambda tuning: MuMis(), reads_forget=True, optional=True)] if situation.judge.kind == "class" else []


def _with_few(situation: Situation) -> list[Rung]:
    """A small mask and gentle steps: of a class at once, of samples where doing less does not do."""
    epochs = max(5, min(20, 40 // situation.steps))
    what = (
        "of the weights are masked and the rest learns gently from the original, since remain data are too few to learn fresh weights from"
    )
    ratios = enumerate((0.001, 0.005, 0.02, 0.05), start=1)
    rungs = [_mask(situation, ratio, number, epochs, f"{100 * ratio:g} % {what}", Distillation()) for number, ratio in ratios]
    rungs.append(
        _mask(situation, 0.005, 0, 0, "0.5 % of the weights are masked and nothing is trained, since remain data are too few for more")
    )
    least = "it is taught its own answers on the remain data, since these are too few to learn fresh weights from"
    # Hardly forgets, so only where it can be seen whether it did.
    distilled = Rung("ResetAndDistil(())", least, 0, epochs, lambda tuning: _distilled((), tuning))
    return [distilled, *rungs] if situation.judge.telling else rungs


def _mask(situation: Situation, ratio: float, strength: int, epochs: int, why: str, teacher: Distillation | None = None) -> Rung:
    kind: Literal["batch", "empirical"] = "batch" if situation.judge.per_sample else "empirical"  # the former needs one label per sample
    label = f"FisherMask.as_released({ratio:g}{'' if epochs else ', tuning=None'}){'' if kind == 'batch' else ' by empirical Fisher'}"

    def build(tuning: Tuning | None) -> Method:
        return replace(FisherMask.as_released(ratio, tuning and replace(tuning, distillation=teacher)), kind=kind)

    return Rung(label, why, strength, epochs, build, reads_forget=True, passes=1 if epochs else 0, fisher=kind)


def _reset(share: float, epochs: int, strength: int, why: str, situation: Situation) -> Rung:
    number = _epochs(epochs, situation)
    return Rung(f"ResetAndDistil({share:g})", why, strength, number, lambda tuning: _distilled(share, tuning), resets=True)


def _distilled(reset: float | tuple[str, ...] | ByFisher, tuning: Tuning | None) -> Method:
    assert tuning is not None  # a rung of this kind has epochs
    return ResetAndDistil(reset, tuning=tuning)


def _epochs(epochs: int, situation: Situation) -> int:
    return lengthened(epochs, situation.steps)


def lengthened(epochs: int, steps: int) -> int:
    """Of so many epochs in the trials as many as small data take, with `steps` each."""
    return max(epochs, -(-epochs * STEPS // steps))
