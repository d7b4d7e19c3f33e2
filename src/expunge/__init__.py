"""Take data out of a trained network.

The names below are imported when first used: `expunge --help` must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expunge import activations, channels, curvature, fisher, heads, masks, methods, metrics, patches, scores, tuning, vision
    from expunge.errors import DivergedError, ExpungeError, InputError, MismatchError, ModelError, UncheckedWarning
    from expunge.fisher import FisherSums
    from expunge.methods import (
        METHODS,
        SCRUB,
        SSD,
        ActivationMask,
        BadTeacher,
        Finetune,
        FisherMask,
        FisherNoise,
        GradientAscent,
        Influence,
        MaskClassifier,
        NegGradPlus,
        NewtonNoise,
        RandomLabels,
        RandomMask,
        Retrain,
        SalUn,
        TfIdfMask,
    )
    from expunge.objective import Objective
    from expunge.patches import Patch
    from expunge.tuning import Constant, Steps, Tuning, replay, train
    from expunge.unlearning import Outcome, Record, unlearn

__version__ = "0.1.0"

_MODULES = (
    "activations",
    "channels",
    "curvature",
    "fisher",
    "heads",
    "masks",
    "methods",
    "metrics",
    "patches",
    "scores",
    "tuning",
    "vision",
)
_NAMES = {
    "errors": ("DivergedError", "ExpungeError", "InputError", "MismatchError", "ModelError", "UncheckedWarning"),
    "fisher": ("FisherSums",),
    "methods": (
        "METHODS",
        "SCRUB",
        "SSD",
        "ActivationMask",
        "BadTeacher",
        "Finetune",
        "FisherMask",
        "FisherNoise",
        "GradientAscent",
        "Influence",
        "MaskClassifier",
        "NegGradPlus",
        "NewtonNoise",
        "RandomLabels",
        "RandomMask",
        "Retrain",
        "SalUn",
        "TfIdfMask",
    ),
    "objective": ("Objective",),
    "patches": ("Patch",),
    "tuning": ("Constant", "Steps", "Tuning", "replay", "train"),
    "unlearning": ("Outcome", "Record", "unlearn"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "METHODS",
    "SCRUB",
    "SSD",
    "ActivationMask",
    "BadTeacher",
    "Constant",
    "DivergedError",
    "ExpungeError",
    "Finetune",
    "FisherMask",
    "FisherNoise",
    "FisherSums",
    "GradientAscent",
    "Influence",
    "InputError",
    "MaskClassifier",
    "MismatchError",
    "ModelError",
    "NegGradPlus",
    "NewtonNoise",
    "Objective",
    "Outcome",
    "Patch",
    "RandomLabels",
    "RandomMask",
    "Record",
    "Retrain",
    "SalUn",
    "Steps",
    "TfIdfMask",
    "Tuning",
    "UncheckedWarning",
    "activations",
    "channels",
    "curvature",
    "fisher",
    "heads",
    "masks",
    "methods",
    "metrics",
    "patches",
    "replay",
    "scores",
    "train",
    "tuning",
    "unlearn",
    "vision",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"expunge.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'expunge' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"expunge.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
