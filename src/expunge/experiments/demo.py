"""A network forgets a handwritten digit: five rows side by side, against a network that never saw it.

Finetune, MaskClassifier, RandomMask, and FisherMask by the text and with λ and R chosen on validation data. All methods: `expunge compare`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from expunge import fisher
from expunge.data.batches import as_batches
from expunge.editing import masks, scores
from expunge.editing.patches import Patch
from expunge.methods import Finetune, FisherMask, MaskClassifier, Method, RandomMask, Retrain
from expunge.metrics import accuracy, unlearn_score
from expunge.model import heads
from expunge.runtime.modes import seeded
from expunge.training.loop import train
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import CLASSES, Digits
from expunge.vision.networks import resnet8
from expunge.vision.recipes import RECIPES
from expunge.vision.scenarios import Images, Scenario, category

# From strong masking to weak. None, the text's sums, is λ = n_remain/n_forget, about 9 here.
REMAIN_WEIGHTS = (1.0, 2.0, 3.0, 5.0, None, 10.0)
RATIOS = (0.1, 0.05, 0.02, 0.01)
TOLERANCE = 0.01

TEXT = "FisherMask, the text"
REFERENCE = "Retrain"


@dataclass(frozen=True)
class Accuracies:
    """On the test part, as fractions."""

    remain: float
    forget: float

    @property
    def score(self) -> float:
        return unlearn_score(self.remain, self.forget)


@dataclass(frozen=True)
class Row:
    """One method: after masking alone (None where nothing is masked) and at the end."""

    name: str
    masked: Accuracies | None
    tuned: Accuracies
    epochs: int
    seconds: float
    model: nn.Module


def recipe(epochs: int, seed: int = 0) -> Tuning:
    """The paper's schedule in so many epochs, for training, retraining and fine-tuning alike."""
    return RECIPES["digits"].replayed(epochs, seed)


def network() -> nn.Module:
    """A small ResNet with fresh weights."""
    return resnet8(CLASSES, channels=1)


def trained(images: Images, epochs: int, seed: int = 0, progress: bool = False) -> nn.Module:
    """A network that knows these digits."""
    with seeded(seed, torch.device("cpu")):
        model = network()
    train(model, images, recipe(epochs, seed), progress=progress)
    return model


def chosen(model: nn.Module, scenario: Scenario, tuning: Tuning | None, progress: bool = False) -> FisherMask:
    """FisherMask with the strongest masking (small λ, large ratio) within a point of the best unlearn score on the validation part.

    Scored after masking alone; the strongest, because fine-tuning lets a little come back. The two Fisher passes are shared by all
    settings, so a setting costs no more than a look at the validation images. Where every mask does more harm than good, ratio 0.
    """
    head = heads.find(model, next(iter(as_batches(scenario.forget))))
    allowed = masks.candidates(model, head, which="all")
    forget_sums, remain_sums = (fisher.diagonal(model, as_batches(part), parameters=allowed, progress=progress) for part in scenario)
    remain, forget = scenario.validation["remain"], scenario.validation["forget"]
    found: dict[tuple[float | None, float], float] = {}
    for remain_weight in REMAIN_WEIGHTS:
        score = scores.fisher_difference(forget_sums, remain_sums, remain_weight)
        for ratio in RATIOS:
            patch = Patch.zeroing(model, masks.select(score, ratio, candidates=allowed))
            patch.apply(model)
            found[remain_weight, ratio] = unlearn_score(accuracy(model, remain), accuracy(model, forget))
            patch.revert(model)
    found[None, 0.0] = unlearn_score(accuracy(model, remain), accuracy(model, forget))
    good_enough = max(found.values()) - TOLERANCE
    remain_weight, ratio = next(setting for setting, score in found.items() if score >= good_enough)
    return FisherMask(ratio, remain_weight=remain_weight, tuning=tuning)


def rows(
    model: nn.Module, data: Digits, label: int, epochs: int, tuning_epochs: int, seed: int = 0, progress: bool = False
) -> Iterator[Row]:
    """Every method on the same model, one after the other; last the reference, a network that never saw the digit."""
    scenario = category(data.train, label, data.test, data.validation)
    short = recipe(tuning_epochs, seed)

    def row(name: str, method: Method, choosing: float = 0.0) -> Row:
        outcome = unlearn(model, scenario.forget, scenario.remain, method, watch=scenario.tests, progress=progress)
        first, last = (Accuracies(**outcome.epochs[index].accuracies) for index in (0, -1))
        masked = None if outcome.edit is None else first
        return Row(name, masked, last, len(outcome.epochs) - 1, outcome.seconds + choosing, outcome.model)

    yield row("Finetune", Finetune(short))
    yield row("MaskClassifier", MaskClassifier(label))
    yield row("RandomMask", RandomMask(seed=seed, tuning=short))
    yield row(TEXT, FisherMask(tuning=short))
    started = time.perf_counter()
    best = chosen(model, scenario, short, progress)
    weight = "sums" if best.remain_weight is None else f"{best.remain_weight:g}"
    yield row(f"FisherMask λ={weight} R={best.ratio:g}", best, time.perf_counter() - started)
    yield row(REFERENCE, Retrain(recipe(epochs, seed), fresh=network))
