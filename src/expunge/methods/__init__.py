"""Collect the methods: frozen dataclasses whose fields are their settings."""

from expunge.methods.activation import ActivationMask, TfIdfMask
from expunge.methods.choice import Choice
from expunge.methods.choosing import Choose
from expunge.methods.context import Method, Run
from expunge.methods.dampening import SSD
from expunge.methods.distillation import SCRUB, BadTeacher
from expunge.methods.influence import Influence
from expunge.methods.masking import FisherMask, MaskClassifier, RandomMask
from expunge.methods.noise import FisherNoise, NewtonNoise
from expunge.methods.opposing import GradientAscent, NegGradPlus
from expunge.methods.relabelling import RandomLabels
from expunge.methods.resetting import ByFisher, ResetAndDistil
from expunge.methods.saliency import SalUn
from expunge.methods.training import Finetune, Retrain

METHODS = {
    "fisher-mask": FisherMask,
    "random-mask": RandomMask,
    "activation-mask": ActivationMask,
    "tf-idf-mask": TfIdfMask,
    "mask-classifier": MaskClassifier,
    "fisher-noise": FisherNoise,
    "newton-noise": NewtonNoise,
    "influence": Influence,
    "ssd": SSD,
    "gradient-ascent": GradientAscent,
    "neg-grad-plus": NegGradPlus,
    "random-labels": RandomLabels,
    "salun": SalUn,
    "bad-teacher": BadTeacher,
    "scrub": SCRUB,
    "finetune": Finetune,
    "retrain": Retrain,
}

__all__ = [
    "METHODS",
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
    "MaskClassifier",
    "Method",
    "NegGradPlus",
    "NewtonNoise",
    "RandomLabels",
    "RandomMask",
    "ResetAndDistil",
    "Retrain",
    "Run",
    "SalUn",
    "TfIdfMask",
]
