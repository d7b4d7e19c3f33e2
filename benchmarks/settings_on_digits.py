"""The settings that methods have on the digits (experiments/profiles.py): every value of a small grid, scored on validation data.

    PYTHONPATH=src python benchmarks/settings_on_digits.py              about 8 minutes on one core
    PYTHONPATH=src python benchmarks/settings_on_digits.py mu-mis jit   some of them

Two networks (seeds 1 and 2, of the split of seed 0), the digits 0 and 5 removed; the unlearn score at the best epoch, in percent. No test
image is looked at, and the networks and the digit of docs/comparing.md are not among these. Methods that decide themselves when to stop
are scored at their last epoch, and score 0 where they diverge.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam

from expunge import metrics
from expunge.errors import DivergedError
from expunge.methods import (
    LFSSD,
    MSG,
    SCRUB,
    BadTeacher,
    GradientAscent,
    Influence,
    JiT,
    LoTUS,
    Method,
    MuMis,
    NegGradPlus,
    Potion,
    RandomLabels,
    SalUn,
    SFRon,
)
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import trained
from expunge.vision.scenarios import category

SEEDS, DIGITS, EPOCHS, TUNING_EPOCHS = (1, 2), (0, 5), 40, 5


def steady(rate: float, seed: int, **other: Any) -> Tuning:
    return Tuning(Constant(rate, TUNING_EPOCHS), batch_size=32, weight_decay=5e-4, seed=seed, **other)


def alone(rate: float, epochs: int, size: int, seed: int, **other: Any) -> Tuning:
    return Tuning(Constant(rate, epochs), batch_size=size, weight_decay=0.0, seed=seed, eval_mode=True, **other)


GRIDS: dict[str, tuple[tuple[Any, ...], Callable[[Any, int], Method]]] = {
    "gradient-ascent, rate": ((3e-4, 1e-3, 3e-3), lambda rate, seed: GradientAscent(steady(rate, seed))),
    "neg-grad-plus, β and rate": (
        tuple(itertools.product((0.9, 0.99, 0.999), (0.01, 0.03))),
        lambda both, seed: NegGradPlus(both[0], steady(both[1], seed, momentum=0.0)),
    ),
    "random-labels, rate": ((1e-4, 3e-4, 1e-3), lambda rate, seed: RandomLabels(tuning=steady(rate, seed, optimizer=Adam))),
    "salun, rate": ((0.005, 0.013, 0.03), lambda rate, seed: SalUn(tuning=steady(rate, seed))),
    "bad-teacher, rate": ((1e-4, 3e-4, 1e-3), lambda rate, seed: BadTeacher(tuning=steady(rate, seed, optimizer=Adam))),
    "scrub, rate": ((0.002, 0.005, 0.01), lambda rate, seed: SCRUB(forget_batch_size=32, tuning=steady(rate, seed))),
    "msg, ratio and rate": (
        tuple(itertools.product((0.3, 0.5, 0.7), (0.1, 0.2))),
        lambda both, seed: MSG(both[0], seed=seed, tuning=steady(both[1], seed)),
    ),
    "sfron, rate": ((1e-3, 3e-3, 0.01), lambda rate, seed: SFRon(tuning=steady(rate, seed))),
    "lotus, α and rate": (
        tuple(itertools.product((2, 8, 32), (3e-4, 1e-3))),
        lambda both, seed: LoTUS(both[0], tuning=steady(both[1], seed, optimizer=Adam)),
    ),
    "mu-mis, δ and rate": (
        tuple(itertools.product((1.25, 1.5, 1.75, 2.0), (5e-4, 1e-3, 2e-3))),
        lambda both, seed: MuMis(both[0], alone(both[1], 40, 64, seed)),
    ),
    "jit, σ and rate": (
        tuple(itertools.product((0.1, 0.5, 1.0), (3e-4, 1e-3, 3e-3))),
        lambda both, seed: JiT(both[0], tuning=alone(both[1], 1, 128, seed, momentum=0.0)),
    ),
    "influence, strength": ((10, 20, 30), lambda strength, seed: Influence("sum", strength=strength)),
    "lfssd, α": ((1.5, 2.0, 3.0, 5.26, 7.0), lambda threshold, seed: LFSSD(threshold)),
    "potion, ρ": ((0.0, 0.05, 0.1, 0.2, 0.3), lambda goal, seed: Potion(goal)),
}


STOPPING = ("mu-mis", "jit")


def score(name: str, model: torch.nn.Module, digit: int, data: Any, method: Method) -> float:
    scenario = category(data.train, digit, validation=data.validation)
    try:
        history = unlearn(model, *scenario, method, watch=scenario.watch).history
    except DivergedError:
        return 0.0
    last = history[-1].accuracies
    if name.startswith(STOPPING):
        return 100 * metrics.unlearn_score(last["validation remain"], last["validation forget"])
    return 100 * metrics.best_epoch(history).score


def main() -> None:
    torch.set_num_threads(1)
    data = digits(0)
    models = {seed: trained(data.train, EPOCHS, seed) for seed in SEEDS}
    chosen = tuple(sys.argv[1:]) or tuple(GRIDS)
    for name, (values, build) in ((name, grid) for name, grid in GRIDS.items() if name.startswith(chosen)):
        for value in values:
            scores = [score(name, models[seed], digit, data, build(value, seed)) for seed, digit in itertools.product(SEEDS, DIGITS)]
            print(f"{name:26} {value!s:14} {statistics.mean(scores):5.1f}  ({' '.join(f'{score:.1f}' for score in scores)})", flush=True)


if __name__ == "__main__":
    main()
