"""Describe one run as data: what is trained, what is forgotten, how, and by which seed; its digest names its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from expunge.experiments.paper import ORIGINAL
from expunge.storage.codec import Amount, Count, Share, decode, encode
from expunge.training.tuning import Precision
from expunge.vision.recipes import recipe_for

REFERENCE = "retrain"  # the method whose network is the retrained one
UNCHANGED = (REFERENCE, ORIGINAL)  # "methods" that leave a network of the store as it is
CHOSEN = "chosen"  # a reading of fisher-mask: λ and R from validation data
SHARES = ("ratio", "fraction", "remain_fraction")  # settings of methods and scenarios
LIMITS = ("remain_fraction", "remain_count")  # of a scenario: how much remain data is at hand, nothing to the trainings


@dataclass(frozen=True)
class Cell:
    """dataset × network × scenario × method × seed × settings, all of it plain JSON.

    `scenario` is {"kind": "category", "label": 0}, with "remain_fraction" or "remain_count" where not all remain data are at hand;
    `method` {"name": a key of METHODS, the import path of a class, or "original" for w* itself, "reading": "text", "released" or another
    of `readings`, and settings}, with "revision" where the method's rule was corrected, so that a result of the rule before is none of
    this cell; `tuning` the fine-tuning: {"schedule": "replayed", "epochs": 5}, {"schedule": "constant", "rate": 0.1, "epochs": 5},
    {"schedule": "own"} for the method's own, or None. `recipe` is how the networks are trained. `validation` is the share of the training
    data kept apart to choose the epoch on; 0: it is chosen on the test set. `precision` is that of all training, fine-tuning too.
    `relearn`, {"rate": 0.1, "limit": 100} and perhaps "margin", asks for the re-learn time too. `evidence`, {"rate": 0.01, "epochs": 5},
    asks for the re-learn curve, probes and the loss attack, all of the network after the last epoch.
    """

    dataset: str
    network: str
    scenario: Mapping[str, Any]
    method: Mapping[str, Any]
    seed: int
    recipe: Mapping[str, Any]
    tuning: Mapping[str, Any] | None
    validation: Share = 0.0
    precision: Precision = "float32"
    relearn: Mapping[str, Any] | None = None
    evidence: Mapping[str, Any] | None = None
    derived: ClassVar = ("epochs", "tuning_epochs")

    @property
    def epochs(self) -> int:
        return self.recipe["epochs"]

    @property
    def tuning_epochs(self) -> int | None:
        return 0 if self.tuning is None else self.tuning.get("epochs")

    @property
    def model(self) -> str:
        return f"{self.dataset}/{self.network}"

    @property
    def digest(self) -> str:
        content = asdict(self)
        if self.evidence is None:
            del content["evidence"]  # so that cells which were run before there was any keep their names
        return digest_of(content)

    @property
    def label(self) -> str:
        """One line for people; `--only` searches its words."""
        scenario, method = dict(self.scenario), dict(self.method)
        name = method.pop("name") + ("" if (reading := method.pop("reading")) == "text" else f"-{reading}")
        parts = [self.dataset, self.network, scenario.pop("kind"), *_pairs(scenario), name, *_pairs(method)]
        if (decay := self.recipe.get("weight_decay")) not in (None, recipe_for(self.dataset).weight_decay):
            parts.append(f"weight_decay={decay:g}")
        if self.tuning is None:
            parts.append("untuned")
        elif self.tuning["schedule"] == "constant":
            parts.append(f"rate={self.tuning['rate']:g}")
        elif self.tuning["schedule"] == "one-cycle":
            parts.append(f"epochs={self.tuning['epochs']}")
        if self.tuning is not None and "distillation" in self.tuning:
            parts.append("distilled")
        if self.relearn is not None:
            parts.append("re-learn")
        if self.evidence is not None:
            parts.append("evidence")
        return " ".join([*parts, f"seed={self.seed}"])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Cells of one kind take about the same time."""
        epochs = None if self.tuning is None else self.tuning_epochs
        measured = (self.relearn is not None, self.evidence is not None)
        return (self.model, self.scenario["kind"], self.method["name"], self.method["reading"], epochs, *measured)


def check_cell(cell: Cell) -> None:
    """Check a cell that was read from a file: raises ValueError, KeyError, TypeError or AttributeError where it is none."""
    encode(cell), cell.label, hash(cell.kind)  # which need more of the cell's parts than that they are mappings
    decode(Count, cell.epochs, "epochs")
    for name, value in [*cell.scenario.items(), *cell.method.items()]:
        if name in SHARES:
            decode(Share | None, value, name)
    decode(Amount, (cell.relearn or {}).get("margin", 0.0), "margin")
    if cell.evidence is not None:
        decode(Amount, cell.evidence["rate"], "rate")
        decode(Count, cell.evidence["epochs"], "epochs")


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:20]


def _pairs(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()]
