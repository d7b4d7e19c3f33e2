"""One quick setting of every reading of every method, a small model and small data. A new one joins the suite by one entry here."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from expunge.curvature.solvers import ConjugateGradients, LiSSA
from expunge.methods import (
    ASSD,
    LFSSD,
    MSG,
    SCRUB,
    SSD,
    ActivationMask,
    BadTeacher,
    ByFisher,
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
from expunge.methods.lookup import default_tuning, method_class
from expunge.methods.readings import readings
from expunge.training.distillation import Distillation
from expunge.training.schedules import Constant, Steps, replay
from expunge.training.tuning import Tuning

SHORT = ConjugateGradients(iterations=10)
QUICK = Tuning(replay(Steps(), epochs=2), batch_size=16)


def gentle(tuning: Tuning) -> Tuning:
    """For methods that refuse a network which a rate of 0.1 has ruined."""
    return replace(tuning, schedule=Constant(1e-3, tuning.schedule.epochs))


CASES = {
    "fisher-mask": lambda tuning=QUICK: FisherMask(ratio=0.1, tuning=tuning),
    "random-mask": lambda tuning=QUICK: RandomMask(ratio=0.1, tuning=tuning),
    "activation-mask": lambda tuning=QUICK: ActivationMask(ratio=0.1, tuning=tuning),
    "tf-idf-mask": lambda tuning=QUICK: TfIdfMask(ratio=0.1, tuning=tuning),
    "mask-classifier": lambda tuning=None: MaskClassifier(tuning=tuning),
    "fisher-noise": lambda tuning=QUICK: FisherNoise(tuning=tuning),
    "newton-noise": lambda tuning=None: NewtonNoise(solver=SHORT, tuning=tuning),
    "influence": lambda tuning=None: Influence(solver=SHORT, tuning=tuning),
    "ssd": lambda tuning=None: SSD(threshold=1.0, tuning=tuning),
    "assd": lambda tuning=None: ASSD(tuning),
    "lfssd": lambda tuning=None: LFSSD(threshold=1.0, tuning=tuning),
    "potion": lambda tuning=None: Potion(goal=0.9, tuning=tuning),
    "gradient-ascent": lambda tuning=QUICK: GradientAscent(tuning),
    "mu-mis": lambda tuning=QUICK: MuMis(None, gentle(tuning)),
    "jit": lambda tuning=QUICK: JiT(copies=2, tuning=gentle(tuning)),
    "neg-grad-plus": lambda tuning=QUICK: NegGradPlus(0.9, tuning),
    "random-labels": lambda tuning=QUICK: RandomLabels(tuning=tuning),
    "salun": lambda tuning=QUICK: SalUn(tuning=tuning),
    "bad-teacher": lambda tuning=QUICK: BadTeacher(tuning=tuning),
    "scrub": lambda tuning=QUICK: SCRUB(max_epochs=1, tuning=tuning),
    "reset-and-distil": lambda tuning=QUICK: ResetAndDistil(tuning=tuning),
    "msg": lambda tuning=QUICK: MSG(tuning=tuning),
    "sfron": lambda tuning=QUICK: SFRon(forget_weight=1.0, remain_steps=2, tuning=tuning),
    "lotus": lambda tuning=QUICK: LoTUS(tuning=tuning),
    "finetune": lambda tuning=QUICK: Finetune(tuning),
    "retrain": lambda tuning=QUICK: Retrain(tuning),
}

READINGS = {  # those that have a constructor of their own
    "fisher-mask-released": lambda tuning=QUICK: FisherMask.as_released(0.1, tuning),
    "random-mask-released": lambda tuning=QUICK: RandomMask.as_released(0.2, tuning),
    "activation-mask-released": lambda tuning=QUICK: ActivationMask.as_released(0.1, tuning),
    "tf-idf-mask-released": lambda tuning=QUICK: TfIdfMask.as_released(0.1, tuning),
    "fisher-noise-released": lambda tuning=None: FisherNoise.as_released(tuning=tuning),
    "fisher-noise-golatkar": lambda tuning=None: FisherNoise.as_golatkar(tuning=tuning),
    "influence-released": lambda tuning=None: replace(Influence.as_released(tuning=tuning), solver=LiSSA(scale=1000, passes=1)),
    "ssd-released": lambda tuning=None: SSD.as_released(threshold=1.0, tuning=tuning),
    "jit-released": lambda tuning=QUICK: JiT.as_released(copies=2, tuning=gentle(tuning)),
    "salun-released": lambda tuning=QUICK: SalUn.as_released(tuning=tuning),
    "sfron-released": lambda tuning=QUICK: SFRon.as_released(tuning=tuning),
}

UNLISTED = {  # settings that take another path through their method
    "fisher-mask-distilled": lambda tuning=QUICK: FisherMask(0.1, tuning=tuning and replace(tuning, distillation=Distillation())),
    "reset-by-fisher-and-distil": lambda tuning=QUICK: ResetAndDistil(ByFisher(0.6), tuning=tuning),
    "choose": lambda tuning=QUICK: Choose(epochs=2),  # has no tuning of its own: two epochs for all it does
}

OWN: dict[str, Callable] = {}  # in place of all these, where `pytest --method` names a class


def own(path: str) -> dict[str, Callable]:
    """The readings of a method by its import path."""

    def case(build: Callable) -> Callable:
        quick = QUICK if default_tuning(build) is not None else None
        tuned = "tuning" in inspect.signature(build).parameters
        return lambda tuning=quick: build(tuning=tuning) if tuned else build()

    return {path if reading == "text" else f"{path}-{reading}": case(build) for reading, build in readings(method_class(path)).items()}


CHOOSES = ("choose",)  # does something else without remain data
NEEDS_NO_REMAIN = ("gradient-ascent", "mu-mis", "jit", "jit-released")  # train on the forget data alone
WITHOUT_TUNING = (
    "fisher-mask",
    "random-mask",
    "activation-mask",
    "mask-classifier",
    "fisher-mask-released",
    "random-mask-released",
    "activation-mask-released",
)  # on the forget data alone where nothing is fine-tuned

LONGER = Tuning(Constant(0.05, 4), batch_size=16)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Convolution, BatchNorm, dropout, a head; one frozen vector, a gradient left by the caller, mixed modes."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        network = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.ReLU(),
            nn.Linear(8, 3),
        ).to(dtype)
        network(torch.randn(32, 1, 4, 4, dtype=dtype)).square().mean().backward()
    network[0].bias.requires_grad_(False)
    network[1].eval()
    return network


def dataset(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """48 images of three classes that can be told apart."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(48) % 3
    images = torch.randn(48, 1, 4, 4, generator=generator)
    images[:, 0, 0, :3] += 3 * nn.functional.one_hot(labels, 3)
    return TensorDataset(images.to(dtype), labels)


def forget(dtype: torch.dtype = torch.float32) -> Subset:
    return Subset(dataset(dtype), [row for row in range(48) if row % 3 == 0])


def remain(dtype: torch.dtype = torch.float32) -> Subset:
    return Subset(dataset(dtype), [row for row in range(48) if row % 3 != 0])
