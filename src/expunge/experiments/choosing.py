"""Choose λ and R of FisherMask on validation data."""

from __future__ import annotations

from torch import nn

from expunge import fisher
from expunge.data.batches import as_batches
from expunge.editing import masks, scores
from expunge.editing.patches import Patch
from expunge.errors import InputError
from expunge.methods import FisherMask
from expunge.metrics import accuracy, unlearn_score
from expunge.model import heads
from expunge.training.tuning import Tuning
from expunge.vision.scenarios import Scenario

# From strong masking to weak. None, the text's sums, is λ = n_remain/n_forget, about 9 for one class of ten.
REMAIN_WEIGHTS = (1.0, 2.0, 3.0, 5.0, None, 10.0)
RATIOS = (0.1, 0.05, 0.02, 0.01)
TOLERANCE = 0.01


def chosen(model: nn.Module, scenario: Scenario, tuning: Tuning | None = None) -> FisherMask:
    """FisherMask with the strongest masking (small λ, large ratio) within a point of the best unlearn score on the validation part.

    Scored after masking alone; the strongest, because fine-tuning lets a little come back. The two Fisher passes are shared by all
    settings, so a setting costs no more than one pass over the validation images. Where every mask does more harm than good, ratio 0.
    """
    if scenario.remain is None:
        raise InputError("remain", "the choice of λ needs the data to keep", "None")
    if not {"remain", "forget"} <= scenario.validation.keys():
        raise InputError("validation", "the choice of λ and R needs validation data", "none")
    head = heads.find(model, next(iter(as_batches(scenario.forget))))
    allowed = masks.candidates(model, head, which="all")
    forget_sums, remain_sums = (fisher.diagonal(model, as_batches(part), parameters=allowed) for part in scenario)
    remain, forget = scenario.validation["remain"], scenario.validation["forget"]

    def measured() -> float:
        return unlearn_score(accuracy(model, remain), accuracy(model, forget))

    achieved: dict[tuple[float | None, float], float] = {}
    for remain_weight in REMAIN_WEIGHTS:
        score = scores.fisher_difference(forget_sums, remain_sums, remain_weight)
        for ratio in RATIOS:
            patch = Patch.zeroing(model, masks.select(score, ratio, candidates=allowed))
            patch.apply(model)
            achieved[remain_weight, ratio] = measured()
            patch.revert(model)
    achieved[None, 0.0] = measured()
    good_enough = max(achieved.values()) - TOLERANCE
    remain_weight, ratio = next(setting for setting, value in achieved.items() if value >= good_enough)
    return FisherMask(ratio, remain_weight=remain_weight, tuning=tuning)
