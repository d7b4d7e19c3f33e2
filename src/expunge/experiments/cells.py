"""One run as data: what is trained, what is forgotten, how, and by which seed; its digest names its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from expunge.training.tuning import Precision
from expunge.vision.recipes import recipe_for

LIMITS = ("remain_fraction", "remain_count")  # of a scenario: how much remain data is at hand, nothing to the trainings


@dataclass(frozen=True)
class Cell:
    """dataset × network × scenario × method × seed × settings, all of it plain JSON.

    `scenario` is {"kind": "category", "label": 0}, with "remain_fraction" or "remain_count" where not all remain data are at hand;
    `method` {"name": a key of METHODS or the import path of a class, "reading": "text", "released" or another of `readings`, and
    settings}, with "revision" where the method's rule was corrected, so that a result of the rule before is none of this cell; `tuning`
    the fine-tuning: {"schedule": "replayed", "epochs": 5}, {"schedule": "constant", "rate": 0.1, "epochs": 5}, {"schedule": "own"} for
    the method's own, or None. `recipe` is how the networks are trained. `validation` is the share of the training data kept apart to
    choose the epoch on; 0: it is chosen on the test set. `precision` is that of all training, fine-tuning too. `relearn`, {"rate": 0.1,
    "limit": 100} and perhaps "margin", asks for the re-learn time too.
    """

    dataset: str
    network: str
    scenario: Mapping[str, Any]
    method: Mapping[str, Any]
    seed: int
    recipe: Mapping[str, Any]
    tuning: Mapping[str, Any] | None
    validation: float = 0.0
    precision: Precision = "float32"
    relearn: Mapping[str, Any] | None = None

    @property
    def model(self) -> str:
        return f"{self.dataset}/{self.network}"

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))

    @property
    def label(self) -> str:
        """One line for people, and what `--only` looks in."""
        scenario, method = dict(self.scenario), dict(self.method)
        name = method.pop("name") + ("" if (reading := method.pop("reading")) == "text" else f"-{reading}")
        parts = [self.dataset, self.network, scenario.pop("kind"), *_pairs(scenario), name, *_pairs(method)]
        if (decay := self.recipe.get("weight_decay")) not in (None, recipe_for(self.dataset).weight_decay):
            parts.append(f"weight_decay={decay:g}")
        if self.tuning is None:
            parts.append("untuned")
        elif self.tuning["schedule"] == "constant":
            parts.append(f"rate={self.tuning['rate']:g}")
        if self.relearn is not None:
            parts.append("re-learn")
        return " ".join([*parts, f"seed={self.seed}"])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Cells of one kind take about the same time."""
        epochs = None if self.tuning is None else self.tuning.get("epochs")
        return (self.model, self.scenario["kind"], self.method["name"], self.method["reading"], epochs, self.relearn is not None)

    def as_json(self) -> dict[str, Any]:
        tuned = 0 if self.tuning is None else self.tuning.get("epochs")
        return {**asdict(self), "epochs": self.recipe["epochs"], "tuning_epochs": tuned}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Cell:
        return cls(**{name: value for name, value in content.items() if name not in ("epochs", "tuning_epochs")})


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:20]


def _pairs(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()]
