"""Define the sizes in which the experiments are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.experiments.paper import GOOGLENET, RESNET20
from expunge.training.tuning import Precision
from expunge.vision.datasets import DIGITS, READERS
from expunge.vision.networks import NETWORKS

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """A size of the experiments. `models` are DATASET/NETWORK: tables 1 and 2 and `forget` take all of them, everything else the first.

    `settings` are those of single methods, as written, where their defaults do not suit the data, with "tuning" for their training
    (for `tuning_epochs`, unless it has "epochs").
    `own` are methods beside METHODS, by import path: `package.module:Class`.
    """

    name: str
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    training: Settings = field(default_factory=dict)  # changes of the dataset's recipe
    tuning_epochs: int = 5
    validation: float = 0.0
    precision: Precision = "float32"
    poison: Settings = field(default_factory=lambda: {"n": 200, "trigger": 4})
    remain_fraction: float = 0.001
    ratios: tuple[float, ...] = (0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.10, 0.12)
    relearn: Settings = field(default_factory=lambda: {"rate": 0.01, "limit": 20, "margin": 0.05})
    evidence: Settings = field(default_factory=lambda: {"rate": 0.01, "epochs": 5})
    influence_models: tuple[str, ...] = ()  # beside the first model
    settings: Mapping[str, Settings] = field(default_factory=dict)
    own: tuple[str, ...] = ()


def _steady(rate: float, **other: Any) -> dict[str, Any]:
    return {"schedule": "constant", "rate": rate, "weight_decay": 5e-4, **other}


# Chosen on validation data from small grids: benchmarks/settings_on_digits.py. What is not named keeps its defaults.
ON_DIGITS: Mapping[str, Settings] = {
    "newton-noise": {"tuning": {"schedule": "replayed"}},  # as FisherNoise: the noise alone breaks so small a network
    "influence": {"gradient": "sum", "strength": 30},
    "potion": {"goal": 0.0},
    "gradient-ascent": {"tuning": _steady(3e-3)},
    "mu-mis": {"recovery": 1.75, "tuning": _steady(2e-3, epochs=40, batch_size=64, weight_decay=0.0, eval_mode=True)},
    "neg-grad-plus": {"remain_weight": 0.9, "tuning": _steady(0.03, momentum=0.0)},
    "random-labels": {"tuning": _steady(1e-3, optimizer="adam")},
    "salun": {"tuning": _steady(0.013)},
    "bad-teacher": {"tuning": _steady(3e-4, optimizer="adam")},
    "scrub": {"forget_batch_size": 32, "tuning": _steady(5e-3)},
    "msg": {"ratio": 0.5, "tuning": _steady(0.2)},
    "sfron": {"tuning": _steady(3e-3)},
    "lotus": {"gain": 8.0, "tuning": _steady(1e-3, optimizer="adam")},
}
SMOKE = Profile(
    name="smoke",
    models=("digits/resnet8",),
    seeds=(666, 777),
    training={"epochs": 30},
    validation=0.2,
    poison={"n": 60, "trigger": 2, "value": "white"},  # digits are black in the corner anyway
    remain_fraction=0.05,  # 54 samples: about as many as the paper's 0.1 %
    settings=ON_DIGITS,
)
PAPER = Profile(
    name="paper",
    models=(RESNET20, GOOGLENET),
    seeds=(666, 777, 888),
    precision="bfloat16",
    influence_models=("cifar100/resnet50_cifar",),
)
PROFILES = {profile.name: profile for profile in (SMOKE, PAPER)}


def profile_of(name: str, seeds: Sequence[int] = (), models: Sequence[str] = ()) -> Profile:
    if name not in PROFILES:
        raise InputError("profile", f"must be one of {', '.join(PROFILES)}", name)
    profile, named = PROFILES[name], []
    for model in models:
        dataset, _, network = model.rpartition("/")  # a folder's path may have slashes too
        if not dataset:
            raise InputError("models", "must be DATASET/NETWORK, such as cifar10/vgg16", model)
        if dataset not in (DIGITS, *READERS) and not Path(dataset).is_dir():
            raise InputError("models", f"the dataset must be one of {', '.join((DIGITS, *READERS))}, or a folder of pictures", model)
        if network not in NETWORKS:
            raise InputError("models", f"the network must be one of {', '.join(NETWORKS)}", model)
        named.append(f"{Path(dataset).as_posix()}/{network}")
    return replace(profile, seeds=tuple(seeds) or profile.seeds, models=tuple(named) or profile.models)
