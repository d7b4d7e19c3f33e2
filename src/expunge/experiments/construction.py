"""Build the images, the scenario and the method of a cell from its plain data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from expunge.errors import InputError
from expunge.experiments.cells import LIMITS, Cell
from expunge.methods import METHODS, ByFisher, Method
from expunge.methods.lookup import default_tuning, method_class
from expunge.methods.readings import readings
from expunge.metrics import Relearning
from expunge.training.distillation import Distillation
from expunge.training.schedules import Constant, OneCycle
from expunge.training.tuning import Tuning
from expunge.vision import scenarios
from expunge.vision.datasets import Images, ImageSet, load, split
from expunge.vision.recipes import Recipe
from expunge.vision.scenarios import Scenario

OPTIMIZERS = {"adam": torch.optim.Adam}


@dataclass(frozen=True)
class Parts:
    """The images of an experiment, on the device they are used on; `validation` is kept from the training data."""

    train: Images
    validation: Images | None
    test: Images
    classes: int
    channels: int


@lru_cache(maxsize=4)
def parts(dataset: str, validation: float, data: str | None, device: torch.device) -> Parts:
    images: ImageSet = load(dataset, data).to(device)
    kept = split(images.train, validation) if validation else None
    train = images.train if kept is None else kept.train
    return Parts(train, None if kept is None else kept.validation, images.test, images.classes, images.channels)


def scenario_of(scenario: Mapping[str, Any], images: Parts, seed: int) -> Scenario:
    """The scenario of a cell; the cell's seed decides which samples are drawn, as it decides the network."""
    settings = {name: value for name, value in scenario.items() if name not in ("kind", *LIMITS)}
    settings |= {"test": images.test, "validation": images.validation}
    kind = scenario["kind"]
    if kind == "category":
        drawn = scenarios.category(images.train, settings.pop("label"), **settings)
    elif kind == "poisoned":
        drawn = scenarios.poisoned(images.train, **{**settings, "value": _value(settings.get("value", 0.0), images.train)}, seed=seed)
    elif kind == "mislabelled":
        drawn = scenarios.mislabelled(images.train, **settings, seed=seed)
    elif kind == "subset":
        drawn = scenarios.subset(images.train, **settings, seed=seed)
    else:
        raise InputError("scenario", "kind must be category, poisoned, mislabelled or subset", kind)
    if "remain_count" in scenario:
        return scenarios.limited(drawn, count=scenario["remain_count"], seed=seed)
    return scenarios.limited(drawn, fraction=scenario["remain_fraction"], seed=seed) if "remain_fraction" in scenario else drawn


def _value(value: float | str, images: Images) -> float | tuple[float, ...]:
    """The trigger's value: a number in the units of the normalised images, or "black" or "white"."""
    if isinstance(value, str):
        if value not in ("black", "white"):
            raise InputError("value", "must be a number, black or white", value)
        level = 1.0 if value == "white" else 0.0
        return tuple((level - mean) / std for mean, std in zip(images.mean, images.std, strict=True))
    return value


def method_of(cell: Cell) -> Method:
    """The method in the cell's reading; seed and tuning are the cell's where the method has such settings."""
    settings = dict(cell.method)
    name, reading = settings.pop("name"), settings.pop("reading")
    settings.pop("revision", None)
    build = readings(method_class(name)).get(reading)
    if build is None:
        raise InputError("method", f"{name} has no reading", reading)
    known = inspect.signature(build).parameters
    if unknown := sorted(settings.keys() - known.keys()):
        raise InputError("method", f"{name} has the settings {', '.join(known)}", ", ".join(unknown))
    if "rounding" in known and name in METHODS:
        # A cell without this setting is one of those in results/paper, whose masks hold at most one unit more than the programs'.
        settings.setdefault("rounding", "nearest")
    if "seed" in known:
        settings.setdefault("seed", cell.seed)
    if "tuning" in known:
        settings["tuning"] = tuning_of(cell, default_tuning(build))
    if isinstance(reset := settings.get("reset"), Mapping):
        settings["reset"] = ByFisher(**reset)
    elif isinstance(reset, list):
        settings["reset"] = tuple(reset)
    return build(**settings)


def tuning_of(cell: Cell, own: Tuning | None = None) -> Tuning | None:
    if cell.tuning is None:
        return None
    settings: dict[str, Any] = {"precision": cell.precision, **cell.tuning}
    schedule, epochs, rate = settings.pop("schedule"), settings.pop("epochs", None), settings.pop("rate", None)
    if "optimizer" in settings:
        settings["optimizer"] = OPTIMIZERS[settings["optimizer"]]
    if "distillation" in settings:
        settings["distillation"] = Distillation(**settings["distillation"])
    if schedule == "own":
        if own is not None and epochs not in (None, own.schedule.epochs):
            raise InputError("tuning", f"of the method's own schedule has {own.schedule.epochs} epochs; leave epochs out", epochs)
        return None if own is None else replace(own, seed=cell.seed, **settings)
    recipe = recipe_of(cell.recipe)
    replayed = recipe.replayed(epochs, cell.seed)
    if schedule == "replayed":
        return replace(replayed, **settings)
    if schedule == "constant":
        return replace(replayed, schedule=Constant(rate, epochs), **settings)
    if schedule == "one-cycle":
        return replace(replayed, schedule=OneCycle(recipe.rate if rate is None else rate, epochs), **settings)
    raise InputError("tuning", "schedule must be replayed, one-cycle, constant or own", schedule)


def recipe_of(recipe: Mapping[str, Any]) -> Recipe:
    return Recipe(**_tuples(recipe))


def relearning_of(cell: Cell) -> Relearning:
    """As the released program counts: full epochs in train mode at one rate, with the recipe's batches."""
    settings = dict(cell.relearn or {})
    recipe = recipe_of(cell.recipe)
    tuning = replace(recipe.tuning(cell.seed, cell.precision), schedule=Constant(settings.pop("rate"), settings.pop("limit")))
    return Relearning(tuning, **settings)


def curve_tuning_of(cell: Cell) -> Tuning:
    """Of the re-learn curve: full epochs in train mode at one rate, with the recipe's batches."""
    assert cell.evidence is not None
    schedule = Constant(cell.evidence["rate"], cell.evidence["epochs"])
    return replace(recipe_of(cell.recipe).tuning(cell.seed, cell.precision), schedule=schedule)


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
