"""Ways to forget: each a frozen dataclass whose fields are its settings."""

from expunge.methods.masking import FisherMask, MaskClassifier, RandomMask
from expunge.methods.run import Method, Run
from expunge.methods.training import Finetune, Retrain

METHODS = {
    "fisher-mask": FisherMask,
    "random-mask": RandomMask,
    "mask-classifier": MaskClassifier,
    "finetune": Finetune,
    "retrain": Retrain,
}

__all__ = ["METHODS", "Finetune", "FisherMask", "MaskClassifier", "Method", "RandomMask", "Retrain", "Run"]
