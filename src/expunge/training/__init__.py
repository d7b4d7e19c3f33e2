"""Train a model: the one training loop, its settings and schedules, and several trainings side by side."""

from expunge.training.carrying import Carried
from expunge.training.distillation import Distillation
from expunge.training.keeping import kept
from expunge.training.loop import Phase, steps, train, train_phases
from expunge.training.schedules import Constant, OneCycle, Replay, Schedule, Steps, replay
from expunge.training.sharing import shared
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Precision, Tuning

__all__ = [
    "Carried",
    "Constant",
    "Distillation",
    "OneCycle",
    "Phase",
    "Precision",
    "Replay",
    "Schedule",
    "Steps",
    "Training",
    "Tuning",
    "kept",
    "replay",
    "shared",
    "steps",
    "train",
    "train_phases",
    "train_together",
]
