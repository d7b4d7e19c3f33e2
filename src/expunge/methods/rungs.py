"""List the settings that are worth a trial for what there is to unlearn, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from expunge.methods.context import Method
from expunge.methods.judging import Verdict
from expunge.methods.masking import FisherMask
from expunge.methods.resetting import ByFisher, ResetAndDistil
from expunge.methods.situation import Situation
from expunge.training.tuning import Tuning

THIRD, TWO_THIRDS, ALL = 0.35, 0.67, 1.0  # of the depth, from the output
STEPS = 60  # per epoch of the trials, at least: small data take more epochs
MOST_CLASSES = 20  # an expected Fisher pass costs a backward pass for each
MANY_WRONG = 0.2  # of all data: from here on wrong labels have spoilt what the network teaches


@dataclass(frozen=True)
class Rung:
    """A setting to try. `strength` orders settings by how much they replace; `passes` are those over the remain data beside training.

    `build` makes the method of a tuning; `epochs` 0: nothing is trained.
    """

    why: str
    strength: int
    epochs: int
    build: Callable[[Tuning | None], Method]
    reads_forget: bool = False
    passes: int = 0


def ladder(situation: Situation, outputs: int) -> list[Rung]:
    """In the order of trial. Trials on CIFAR-10: results/trials/README.md."""
    if situation.remain is None:
        return _without_remain(situation)
    if situation.few:
        return _with_few(situation)
    return _classes(situation, outputs) if situation.judge.kind == "class" else _samples(situation)


def by_heart(situation: Situation) -> Rung:
    """For labels that the network only knew by heart, as wrong ones are: with many of them its answers are spoilt."""
    return _reset(ALL, 10, 3, "all weights fresh: what so many wrong labels spoilt is not taught again", situation)


def without_reset(situation: Situation) -> list[Rung]:
    """For a network with modules that nothing can give fresh weights."""
    wide = "its answers on remain data are taught to itself, since its modules cannot be given fresh weights"
    narrow = "weights that matter to the forget data are masked and the rest fine-tuned, since modules cannot be given fresh weights"

    def masked(tuning: Tuning | None) -> Method:
        return FisherMask.as_released(0.05, tuning)

    def distilled(tuning: Tuning | None) -> Method:
        assert tuning is not None
        return ResetAndDistil((), tuning=tuning)

    epochs = _epochs(5, situation)
    return [Rung(narrow, 1, epochs, masked, reads_forget=True, passes=1), Rung(wide, 0, epochs, distilled)]


def left(rungs: Sequence[Rung], tried: Rung, verdict: Verdict) -> list[Rung]:
    """The settings that may do better: stronger ones where it did not forget, gentler or longer ones where it did and lost the rest."""
    if verdict.forgotten is False:
        return [rung for rung in rungs if rung.strength > tried.strength]
    if verdict.kept is False:
        longer = [rung for rung in rungs if rung.strength == tried.strength and rung.epochs > tried.epochs]
        return [rung for rung in rungs if rung.strength < tried.strength or rung in longer]
    return []


def normalised_by_batch(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _classes(situation: Situation, outputs: int) -> list[Rung]:
    chosen = ByFisher(0.6, "expected" if outputs <= MOST_CLASSES else "sampled")

    def by_fisher(tuning: Tuning | None) -> Method:
        assert tuning is not None
        return ResetAndDistil(chosen, tuning=tuning)

    first = "fresh weights where Fisher information points to the class: in our trials nothing else left as little of it as retraining"
    third = "fresh weights in the last third of the depth: kept most accuracy in our trials"
    rungs = [Rung(first, 2, _epochs(5, situation), by_fisher, passes=2), _reset(THIRD, 5, 1, third, situation)]
    if situation.judge.unseen:
        rungs.append(_reset(THIRD, 10, 1, f"{third}, and twice the epochs", situation))
    return [*rungs, _reset(ALL, 10, 3, "all weights fresh, the most that can be done", situation)]


def _samples(situation: Situation) -> list[Rung]:
    two = "fresh weights in the last two thirds of the depth: made samples look unseen in our trials"
    middle = _reset(TWO_THIRDS, 8, 2, two, situation)
    if not situation.judge.telling:
        return [middle]
    gentle = "fresh weights in the last third of the depth: the gentlest that made samples look unseen in our trials, or nearly"
    rungs = [_reset(THIRD, 5, 1, gentle, situation), _reset(THIRD, 10, 1, f"{gentle}; twice the epochs", situation), middle]
    rungs.append(_reset(TWO_THIRDS, 16, 2, f"{two}; twice the epochs", situation))
    return [*rungs, _reset(ALL, 10, 3, "all weights fresh, the most that can be done", situation)]


def _without_remain(situation: Situation) -> list[Rung]:
    """From few weights to many; without anything to guard the rest no more than in the trials."""
    ratios = (0.001, 0.002, 0.005, 0.01, 0.02) if situation.judge.guard is not None else (0.001, 0.002, 0.005)
    return [_mask(ratio, number) for number, ratio in enumerate(ratios)]


def _mask(ratio: float, strength: int) -> Rung:
    why = f"the {100 * ratio:g} % of weights that matter most to the forget data are masked, nothing is trained"
    return Rung(why, strength, 0, lambda tuning: FisherMask.as_released(ratio, None), reads_forget=True)


def _with_few(situation: Situation) -> list[Rung]:
    rungs = []
    for strength, ratio in enumerate((0.005, 0.02, 0.05)):
        why = f"remain data are few: {100 * ratio:g} % of the weights are masked and the rest is fine-tuned gently, nothing is reset"

        def build(tuning: Tuning | None, ratio: float = ratio) -> Method:
            return FisherMask.as_released(ratio, tuning)

        rungs.append(Rung(why, strength, max(5, min(20, 40 // situation.steps)), build, reads_forget=True, passes=1))
    return rungs


def _reset(share: float, epochs: int, strength: int, why: str, situation: Situation) -> Rung:
    def build(tuning: Tuning | None) -> Method:
        assert tuning is not None
        return ResetAndDistil(share, tuning=tuning)

    return Rung(why, strength, _epochs(epochs, situation), build)


def _epochs(epochs: int, situation: Situation) -> int:
    return max(epochs, -(-epochs * STEPS // situation.steps))
