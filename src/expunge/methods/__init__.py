"""Collect the methods: frozen dataclasses whose fields are their settings."""

from expunge.methods.activation import ActivationMask, TfIdfMask
from expunge.methods.adaptive_dampening import ASSD
from expunge.methods.alternating import SFRon
from expunge.methods.choosing.choice import Choice
from expunge.methods.choosing.choose import Choose
from expunge.methods.context import Method, Run
from expunge.methods.dampening import SSD
from expunge.methods.distillation import SCRUB, BadTeacher
from expunge.methods.influence import Influence
from expunge.methods.label_free_dampening import LFSSD
from expunge.methods.masking import FisherMask, MaskClassifier, RandomMask
from expunge.methods.noise import FisherNoise, NewtonNoise
from expunge.methods.opposing import GradientAscent, NegGradPlus
from expunge.methods.poison_dampening import Potion
from expunge.methods.relabelling import RandomLabels
from expunge.methods.renewing import MSG
from expunge.methods.resetting import ByFisher, ResetAndDistil
from expunge.methods.saliency import SalUn
from expunge.methods.sensitivity import MuMis
from expunge.methods.smoothing import JiT
from expunge.methods.tempering import LoTUS
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
    "assd": ASSD,
    "lfssd": LFSSD,
    "potion": Potion,
    "gradient-ascent": GradientAscent,
    "mu-mis": MuMis,
    "jit": JiT,
    "neg-grad-plus": NegGradPlus,
    "random-labels": RandomLabels,
    "salun": SalUn,
    "bad-teacher": BadTeacher,
    "scrub": SCRUB,
    "reset-and-distil": ResetAndDistil,
    "msg": MSG,
    "sfron": SFRon,
    "lotus": LoTUS,
    "finetune": Finetune,
    "retrain": Retrain,
}

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
    "Finetune",
    "FisherMask",
    "FisherNoise",
    "GradientAscent",
    "Influence",
    "LoTUS",
    "JiT",
    "MaskClassifier",
    "Method",
    "MuMis",
    "NegGradPlus",
    "NewtonNoise",
    "Potion",
    "RandomLabels",
    "RandomMask",
    "ResetAndDistil",
    "Retrain",
    "Run",
    "SFRon",
    "SalUn",
    "TfIdfMask",
]
