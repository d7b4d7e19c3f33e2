"""Plan `expunge demo` and `expunge compare`: one network of the digits, one scenario, some methods, one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from expunge.errors import InputError
from expunge.experiments.cells import CHOSEN, REFERENCE
from expunge.experiments.construction import parts, scenario_of
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import DAMPENING, Entry, cells
from expunge.experiments.plans import Experiment
from expunge.experiments.profiles import SMOKE, Profile, Settings
from expunge.methods import METHODS
from expunge.methods.lookup import FORMS, canonical, is_path, method_class
from expunge.methods.readings import readings
from expunge.vision.scenarios import Scenario
from expunge.vision.scenarios.rows import length

DEMO = ("finetune", "mask-classifier", "random-mask", "fisher-mask", f"fisher-mask-{CHOSEN}", "reset-and-distil")
RELEARN: Settings = {**SMOKE.relearn, "limit": 30}
BELONGS = {"label": "category", "n": "poisoned", "trigger": "poisoned", "fraction": "mislabelled or subset"}


def names(asked: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(name, reading) of methods asked for as `ssd`, `ssd-released` or `package.module:Class-released`, all that a group stands for.

    "all" is every one of METHODS and FisherMask with λ and R chosen, "released" every reading of released programs.
    """
    known = {_joined(key, reading): (key, reading) for key, kind in METHODS.items() for reading in readings(kind)}
    known[f"fisher-mask-{CHOSEN}"] = ("fisher-mask", CHOSEN)
    every = [name for name, (_, reading) in known.items() if reading in ("text", CHOSEN)]
    released = [name for name in known if name not in every]
    groups = {"all": every, "released": released}
    rule = f"must be all, released, or some of {', '.join([*every, *released])}; of your own {FORMS}"
    if not asked:
        raise InputError("methods", rule, "none")
    methods: dict[tuple[str, str], None] = {}
    for name in asked:
        if name not in groups and name not in known and not is_path(name):
            raise InputError("methods", rule, name)
        members = groups.get(name, [name])
        methods |= {known[member] if member in known else _own(member): None for member in members}
    return tuple(methods)


def _joined(name: str, reading: str) -> str:
    return name if reading == "text" else f"{name}-{reading}"


def _own(name: str) -> tuple[str, str]:
    """A class by its path, and its reading: what follows a dash behind the class's name."""
    module, _, kind = name.rpartition(":")
    kind, _, reading = kind.partition("-")
    path = canonical(f"{module}:{kind}")
    builders = readings(method_class(path))
    if (reading or "text") not in builders:
        raise InputError("methods", f"the readings of {path} are {', '.join(builders)}", name)
    return path, reading or "text"


def scenario_settings(
    kind: str,
    label: Sequence[int] | None = None,
    n: int | None = None,
    trigger: int | None = None,
    fraction: float | None = None,
    remain_fraction: float | None = None,
    remain: bool = True,
) -> dict[str, Any]:
    """A cell's scenario. A setting that belongs to another kind raises InputError; None means the default."""
    for argument, value in (("label", label), ("n", n), ("trigger", trigger), ("fraction", fraction)):
        if value is not None and kind not in BELONGS[argument]:
            raise InputError(argument, f"is for the scenario {BELONGS[argument]}", kind)
    if remain_fraction is not None and not remain:
        raise InputError("remain_fraction", "is for remain data, of which there are none", remain_fraction)
    limit: dict[str, Any] = {} if remain_fraction is None else {"remain_fraction": remain_fraction}
    limit |= {} if remain else {"remain_count": 0}
    if kind == "category":
        labels = [0] if label is None else list(label)
        return {"kind": kind, "label": labels[0] if len(labels) == 1 else labels, **limit}
    if kind == "poisoned":
        sizes = {"n": n, "trigger": trigger}
        return {"kind": kind, **SMOKE.poison, **{name: value for name, value in sizes.items() if value is not None}, **limit}
    return {"kind": kind, "fraction": fraction if fraction is not None else 0.1 if kind == "mislabelled" else 0.05, **limit}


@dataclass(frozen=True)
class Plan:
    """Methods on one network: `entries` are their cells, that of the network before first and the retrained one's last."""

    experiment: Experiment
    entries: tuple[Entry, ...]
    scenario: Scenario


def comparison(
    name: str,
    scenario: Settings,
    methods: Sequence[tuple[str, str]],
    epochs: int,
    tuning_epochs: int,
    seed: int = 0,
    relearn: Settings | None = None,
) -> Plan:
    """The plan of `expunge compare`, or of another command by its `name`; the scenario is drawn here, so mistakes in it raise first."""
    for argument, value in (("epochs", epochs), ("tuning_epochs", tuning_epochs)):
        if value < 1:
            raise InputError(argument, "must be at least 1", value)
    profile = replace(SMOKE, name=name, seeds=(seed,), training={"epochs": epochs}, tuning_epochs=tuning_epochs)
    drawn = _scenario(scenario, profile, seed)
    dampening = {"threshold": round(_threshold(drawn), 2)}
    profile = replace(profile, settings={**profile.settings, **dict.fromkeys(DAMPENING, dampening)})
    listed = [(ORIGINAL, "text"), *(method for method in methods if method[0] != REFERENCE), (REFERENCE, "text")]

    def entries(profile: Profile) -> Sequence[Entry]:
        model = profile.models[0]
        made = [(method, cell) for method, reading in listed for cell in cells(profile, model, scenario, method, reading)]
        return [Entry(replace(cell, relearn=relearn), model, "", method) for method, cell in made]

    views = ("summary", "evidence") if relearn is not None else ("summary",)
    experiment = Experiment(name, drawn.name, views, lambda profile: iter(entries(profile)))
    return Plan(experiment, tuple(entries(profile)), drawn)


def _scenario(settings: Settings, profile: Profile, seed: int) -> Scenario:
    images = parts(profile.models[0].partition("/")[0], profile.validation, None, torch.device("cpu"))
    whole = {name: value for name, value in settings.items() if name != "remain_fraction"}
    complete = scenario_of(whole, images, seed)
    if "remain_fraction" not in settings:
        return complete
    try:
        return scenario_of(settings, images, seed)
    except InputError as error:
        rule = f"must be a share of the {length(images.train)} training samples, of which {length(complete.retrain)} remain"
        raise InputError("remain_fraction", rule, settings["remain_fraction"]) from error


def _threshold(scenario: Scenario, against_remain: float = 10.0) -> float:
    """SSD's and LFSSD's α for a threshold on the ratio to the remain data, so always below its ceiling n/n_f: see docs/dampening.md."""
    remain = 0 if scenario.remain is None else len(scenario.remain)
    return against_remain * (len(scenario.forget) + remain) / (remain + against_remain * len(scenario.forget))
