"""Take data out of a trained network.

The names below are imported when first used: `expunge --help` must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expunge import audit, curvature, fisher, methods, metrics, requests, training, vision
    from expunge.comparing import Comparison, compare
    from expunge.data.objective import Objective
    from expunge.editing import masks, patches, scores
    from expunge.editing.patches import Patch
    from expunge.errors import (
        DivergedError,
        ExpungeError,
        GoalNotMetWarning,
        InputError,
        LostAccuracyWarning,
        MismatchError,
        ModelError,
        NoEffectWarning,
        UncheckedWarning,
    )
    from expunge.fisher import FisherSums
    from expunge.methods import (
        ASSD,
        LFSSD,
        METHODS,
        MSG,
        SCRUB,
        SSD,
        ActivationMask,
        BadTeacher,
        ByFisher,
        Choice,
        Choose,
        Finetune,
        FisherMask,
        FisherNoise,
        GradientAscent,
        Influence,
        JiT,
        LoTUS,
        MaskClassifier,
        MuMis,
        NegGradPlus,
        NewtonNoise,
        Potion,
        RandomLabels,
        RandomMask,
        ResetAndDistil,
        Retrain,
        SalUn,
        SFRon,
        TfIdfMask,
    )
    from expunge.model import activations, channels, heads
    from expunge.outcome import Outcome, Record, load_outcome
    from expunge.training import Constant, Distillation, OneCycle, Steps, Tuning, replay, train
    from expunge.unlearning import unlearn

__version__ = "0.1.0"

_MODULES = {  # public modules by name, and where they are
    "activations": "model.activations",
    "audit": "audit",
    "channels": "model.channels",
    "curvature": "curvature",
    "fisher": "fisher",
    "heads": "model.heads",
    "masks": "editing.masks",
    "methods": "methods",
    "metrics": "metrics",
    "patches": "editing.patches",
    "requests": "requests",
    "scores": "editing.scores",
    "training": "training",
    "vision": "vision",
}
_NAMES = {
    "comparing": ("Comparison", "compare"),
    "errors": (
        "DivergedError",
        "ExpungeError",
        "GoalNotMetWarning",
        "InputError",
        "LostAccuracyWarning",
        "MismatchError",
        "ModelError",
        "NoEffectWarning",
        "UncheckedWarning",
    ),
    "fisher": ("FisherSums",),
    "methods": (
        "ASSD",
        "LFSSD",
        "METHODS",
        "MSG",
        "SCRUB",
        "SSD",
        "ActivationMask",
        "BadTeacher",
        "ByFisher",
        "Choice",
        "Choose",
        "Finetune",
        "FisherMask",
        "FisherNoise",
        "GradientAscent",
        "Influence",
        "LoTUS",
        "JiT",
        "MaskClassifier",
        "MuMis",
        "NegGradPlus",
        "NewtonNoise",
        "Potion",
        "RandomLabels",
        "RandomMask",
        "ResetAndDistil",
        "Retrain",
        "SFRon",
        "SalUn",
        "TfIdfMask",
    ),
    "data.objective": ("Objective",),
    "editing.patches": ("Patch",),
    "training": ("Constant", "Distillation", "OneCycle", "Steps", "Tuning", "replay", "train"),
    "outcome": ("Outcome", "Record", "load_outcome"),
    "unlearning": ("unlearn",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "ASSD",
    "LFSSD",
    "METHODS",
    "MSG",
    "SCRUB",
    "SSD",
    "ActivationMask",
    "BadTeacher",
    "ByFisher",
    "Choice",
    "Choose",
    "Comparison",
    "Constant",
    "Distillation",
    "DivergedError",
    "ExpungeError",
    "Finetune",
    "FisherMask",
    "FisherNoise",
    "FisherSums",
    "GoalNotMetWarning",
    "GradientAscent",
    "Influence",
    "InputError",
    "LoTUS",
    "JiT",
    "LostAccuracyWarning",
    "MaskClassifier",
    "MismatchError",
    "ModelError",
    "MuMis",
    "NegGradPlus",
    "NewtonNoise",
    "NoEffectWarning",
    "Objective",
    "OneCycle",
    "Outcome",
    "Patch",
    "Potion",
    "RandomLabels",
    "RandomMask",
    "Record",
    "ResetAndDistil",
    "Retrain",
    "SFRon",
    "SalUn",
    "Steps",
    "TfIdfMask",
    "Tuning",
    "UncheckedWarning",
    "activations",
    "audit",
    "channels",
    "compare",
    "curvature",
    "fisher",
    "heads",
    "load_outcome",
    "masks",
    "methods",
    "metrics",
    "patches",
    "replay",
    "requests",
    "scores",
    "train",
    "training",
    "unlearn",
    "vision",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"expunge.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'expunge' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"expunge.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
