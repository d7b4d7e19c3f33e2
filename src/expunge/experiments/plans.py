"""Plan the paper's tables and figures as lists of cells."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from expunge.errors import InputError
from expunge.experiments.cells import CHOSEN, REFERENCE, Cell
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.profiles import Profile, Settings
from expunge.methods import METHODS
from expunge.methods.lookup import FORMS, canonical, default_tuning, is_path, method_class
from expunge.methods.readings import readings
from expunge.training.schedules import Steps, replay
from expunge.training.tuning import Tuning
from expunge.vision.recipes import recipe_for

CONTROL = "mask-classifier"
PAPER_METHODS = (REFERENCE, "finetune", "random-mask", "tf-idf-mask", "fisher-noise", "activation-mask", "fisher-mask")
OTHERS = (  # known beside the paper's; a method that is in METHODS and nowhere here gets its row in every table
    CONTROL,
    "newton-noise",
    "influence",
    "ssd",
    "gradient-ascent",
    "mu-mis",
    "jit",
    "neg-grad-plus",
    "random-labels",
    "salun",
    "bad-teacher",
    "scrub",
)
FORGET_ALONE = ("gradient-ascent", "mu-mis", "jit")  # read no remain data, so that some of them change nothing
REVISIONS = {  # of rules that were corrected, by method and reading: a cell without it is one of the rule before
    ("tf-idf-mask", "text"): 2,  # term frequency over channels, not over classes
    ("tf-idf-mask", "released"): 2,
    ("fisher-noise", "released"): 2,  # squared batch gradients; those of single samples are Golatkar's reading
    ("ssd", "released"): 2,  # data read class by class
}
REPLAYED = (Tuning(), Tuning(replay(Steps(), epochs=5)))  # a method of one's own with one of these is fine-tuned as the paper's are
CATEGORY = {"kind": "category", "label": 0}  # the paper removes the first
RATIOS = (0.15, 0.20, 0.25)
SHARES = (0.1, 0.3, 0.5)
RATES = (0.1, 0.01, 0.001)
VARIANTS: dict[str, Settings] = {  # what of FisherMask the text leaves open or the released program does otherwise, one change each
    "as written": {},
    "classifier included": {"include_head": True},
    "expected Fisher": {"kind": "expected"},
    "expected Fisher, classifier included": {"kind": "expected", "include_head": True},
    "batch Fisher": {"kind": "batch"},
    "λ = 1": {"remain_weight": 1.0},
    "λ = 3": {"remain_weight": 3.0},
    "λ = 10": {"remain_weight": 10.0},
    "expected Fisher, λ = 3": {"kind": "expected", "remain_weight": 3.0},
}
DECAYS = (0, 5)  # times the recipe's
CLASSES = {"cifar100": 100, "tiny-imagenet": 200}  # other datasets have 10


@dataclass(frozen=True)
class Entry:
    """A cell and its place: the block of its model, a section of the table, and the row, a method's name or "original" for w*."""

    cell: Cell
    block: str
    section: str
    row: str


@dataclass(frozen=True)
class Experiment:
    """`views` name the tables of the results; see `report.views.VIEWS`."""

    name: str
    title: str
    views: tuple[str, ...]
    entries: Callable[[Profile], Iterator[Entry]]


def _accepts(name: str, reading: str, setting: str) -> Any:
    """The parameter of that setting, or None."""
    if name == ORIGINAL or (reading == CHOSEN and setting != "tuning"):
        return None
    return inspect.signature(readings(method_class(name))["text" if reading == CHOSEN else reading]).parameters.get(setting)


def _readings(name: str) -> tuple[str, ...]:
    return tuple(readings(method_class(name)))


def methods(own: Sequence[str] = (), without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(name, reading), the paper's first, then every other of METHODS, then those of one's own."""
    names = [*PAPER_METHODS, *(name for name in METHODS if name not in PAPER_METHODS), *own]
    return [(name, reading) for name in names if name not in without for reading in _readings(name)]


def _tuning(profile: Profile, name: str, reading: str) -> Settings | None:
    """The paper's methods, and others made for it, are fine-tuned alike by the schedule replayed; the rest trains in its own way."""
    if name == REFERENCE:
        return None
    if reading == "text" and "tuning" in profile.settings.get(name, {}):
        return {"epochs": profile.tuning_epochs, **profile.settings[name]["tuning"]}
    parameter = _accepts(name, reading, "tuning")
    if parameter is None or (name not in PAPER_METHODS and parameter.default is None):
        return None
    own = None if name in PAPER_METHODS else default_tuning(readings(method_class(name))[reading])
    if name in PAPER_METHODS or own in REPLAYED:
        return {"schedule": "replayed", "epochs": profile.tuning_epochs}
    return None if own is None else {"schedule": "own", "epochs": own.schedule.epochs}


def _revision(name: str, reading: str) -> int | str | None:
    """Of the rule, where it was corrected; a class of one's own says it by an attribute `revision`."""
    return getattr(method_class(name), "revision", None) if is_path(name) else REVISIONS.get((name, reading))


def _ssd_threshold(dataset: str, scenario: Settings) -> float:
    """A ratio of 10 to the remain data alone: SSD's is to all data, where 1/f is the most, f the share to forget (docs/dampening.md).

    F_f/F = ρ / (1 − f + ρ·f) at ρ = F_f/F_r.
    """
    shares = {"category": 1 / CLASSES.get(dataset, 10), "mislabelled": scenario.get("fraction", 0.0)}
    share = shares.get(scenario["kind"], 0.0)
    return round(10 / (1 - share + 10 * share), 2)


def cells(
    profile: Profile, model: str, scenario: Settings, name: str, reading: str, ratio: float | None = None, **changes: Any
) -> Iterator[Cell]:
    """One cell per seed; `changes` are of the recipe."""
    dataset, _, network = model.rpartition("/")
    recipe = replace(recipe_for(dataset), **{**profile.training, **changes})
    method: dict[str, Any] = {"name": name, "reading": reading}
    if (revision := _revision(name, reading)) is not None:
        method["revision"] = revision
    if _accepts(name, reading, "ratio") is not None:
        method["ratio"] = recipe.mask_ratio if ratio is None else ratio
    if reading == "text":
        method |= {setting: value for setting, value in profile.settings.get(name, {}).items() if setting != "tuning"}
        if name == "ssd":
            method.setdefault("threshold", _ssd_threshold(dataset, scenario))
    tuning = _tuning(profile, name, reading)
    if scenario.get("remain_count") == 0 and tuning is not None and tuning["schedule"] == "replayed" and name != "finetune":
        tuning = None  # Finetune is nothing else, and says so itself
    plain_recipe = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(recipe).items() if value is not None}
    for seed in profile.seeds:
        yield Cell(dataset, network, scenario, method, seed, plain_recipe, tuning, profile.validation, profile.precision)


def _original(profile: Profile, scenario: Settings, section: str) -> Iterator[Entry]:
    """The row of w*, read off the cells of the retrained network."""
    for cell in cells(profile, profile.models[0], scenario, REFERENCE, "text"):
        yield Entry(cell, profile.models[0], section, ORIGINAL)


def _table1(profile: Profile) -> Iterator[Entry]:
    for model in profile.models:
        for name, reading in methods(profile.own):
            for cell in cells(profile, model, CATEGORY, name, reading):
                yield Entry(cell, model, "", name)


def _table2(profile: Profile) -> Iterator[Entry]:
    return (entry for entry in _table1(profile) if entry.cell.tuning is not None)


def _table3(profile: Profile) -> Iterator[Entry]:
    """What has a mask ratio in a section for each, the rest above; TF-IDF and FisherNoise remove categories, says the paper."""
    model, scenario = profile.models[0], {"kind": "poisoned", **profile.poison}
    listed = methods(profile.own, without=("tf-idf-mask", "fisher-noise", "newton-noise", "influence", CONTROL))
    yield from _original(profile, scenario, "")
    for name, reading in listed:
        if _accepts(name, reading, "ratio") is None:
            for cell in cells(profile, model, scenario, name, reading):
                yield Entry(cell, model, "", name)
    for ratio in RATIOS:
        for name, reading in listed:
            if _accepts(name, reading, "ratio") is not None:
                for cell in cells(profile, model, scenario, name, reading, ratio):
                    yield Entry(cell, model, f"ratio {ratio:.2f}", name)


def _table4(profile: Profile) -> Iterator[Entry]:
    model = profile.models[0]
    for share in SHARES:
        scenario, section = {"kind": "mislabelled", "fraction": share}, f"{100 * share:.0f} %"
        yield from _original(profile, scenario, section)
        for name, reading in methods(profile.own, without=("tf-idf-mask", "fisher-noise", "newton-noise", "influence", CONTROL)):
            for cell in cells(profile, model, scenario, name, reading):
                yield Entry(cell, model, section, name)


def _table5(profile: Profile) -> Iterator[Entry]:
    model, needing = profile.models[0], {*OTHERS, REFERENCE, "finetune", "fisher-noise"} - {CONTROL, *FORGET_ALONE}
    yield from _original(profile, CATEGORY, "")
    for name, reading in methods(profile.own, without=tuple(needing)):
        for cell in cells(profile, model, {**CATEGORY, "remain_count": 0}, name, reading):
            yield Entry(cell, model, "no remain data", name)
    some = {**CATEGORY, "remain_fraction": profile.remain_fraction}
    for name, reading in methods(profile.own, without=(REFERENCE, CONTROL, *FORGET_ALONE)):
        for cell in cells(profile, model, some, name, reading):
            yield Entry(cell, model, f"{100 * profile.remain_fraction:g} % remain data", name)


def _influence(profile: Profile) -> Iterator[Entry]:
    """Finetune and FisherMask are table 1's; the Newton step is not followed by fine-tuning."""
    for model in (profile.models[0], *profile.influence_models):
        for name in ("finetune", "influence", "fisher-mask"):
            for reading in _readings(name):
                for cell in cells(profile, model, CATEGORY, name, reading):
                    yield Entry(cell, model, "", name)


def _relearn(profile: Profile) -> Iterator[Entry]:
    model = profile.models[0]
    for name, reading in methods(profile.own, without=tuple({*OTHERS} - {CONTROL})):
        for cell in cells(profile, model, CATEGORY, name, reading):
            yield Entry(replace(cell, relearn=dict(profile.relearn)), model, "", name)


def _schedule(profile: Profile) -> Iterator[Entry]:
    model = profile.models[0]
    for rate in (None, *RATES):
        for name in ("finetune", "activation-mask", "fisher-mask"):
            for reading in _readings(name):
                for cell in cells(profile, model, CATEGORY, name, reading):
                    if rate is None:
                        yield Entry(cell, model, "replayed", name)
                    else:
                        constant = {"schedule": "constant", "rate": rate, "epochs": profile.tuning_epochs}
                        yield Entry(replace(cell, tuning=constant), model, f"constant {rate:g}", name)


def _ratio(profile: Profile) -> Iterator[Entry]:
    model = profile.models[0]
    for ratio in profile.ratios:
        for reading in _readings("fisher-mask"):
            for cell in cells(profile, model, CATEGORY, "fisher-mask", reading, ratio):
                yield Entry(cell, model, f"ratio {ratio:.2f}", "fisher-mask")


def _settings(profile: Profile) -> Iterator[Entry]:
    """Not in the paper: what its words leave open decides how close one comes to its numbers.

    Another weight decay means other networks, so it has one seed.
    """
    model, once = profile.models[0], replace(profile, seeds=profile.seeds[:1])
    for section, changes in VARIANTS.items():
        for cell in cells(profile, model, CATEGORY, "fisher-mask", "text"):
            yield Entry(replace(cell, method={**cell.method, **changes}), model, section, "fisher-mask")
    for factor in DECAYS:
        decay = factor * recipe_for(model.rpartition("/")[0]).weight_decay
        for name in (REFERENCE, "finetune", "fisher-mask"):
            for cell in cells(once, model, CATEGORY, name, "text", weight_decay=decay):
                yield Entry(cell, model, f"weight decay {decay:g}", name)


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("table1", "Remove a full category", ("masked", "best", "last"), _table1),
        Experiment("table2", "Fluctuation during fine-tuning", ("stability",), _table2),
        Experiment("table3", "Remove poisoned samples", ("best", "last"), _table3),
        Experiment("table4", "Remove wrongly labelled samples", ("best", "last"), _table4),
        Experiment("table5", "With limited remain data", ("best", "last"), _table5),
        Experiment("fig-influence", "Forget accuracy during unlearning", ("forget by epoch",), _influence),
        Experiment("fig-relearn", "Re-learn time", ("relearn",), _relearn),
        Experiment("fig-schedule", "Learning-rate schedules of fine-tuning", ("remain by epoch", "forget by epoch"), _schedule),
        Experiment("fig-ratio", "Ratios of FisherMask", ("remain by epoch", "forget by epoch"), _ratio),
        Experiment("settings", "What decides for FisherMask", ("masked", "best"), _settings),
    )
}


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name; "all" are all of them."""
    for name in names:
        if name != "all" and name not in EXPERIMENTS:
            raise InputError("experiments", f"must be all, or some of {', '.join(EXPERIMENTS)}", name)
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names or "all" in names]


def entries(experiment: Experiment, profile: Profile, only: Sequence[str] = (), listed: Sequence[str] = ("all",)) -> list[Entry]:
    """The cells of an experiment whose label holds every word of `only`; `listed` are methods by name or path, "paper" or "all"."""
    for name in listed or ("none",):
        if name not in ("all", "paper") and name not in METHODS and not is_path(name):
            raise InputError("methods", f"must be all, paper, or some of {', '.join(METHODS)}; of your own {FORMS}", name)
    listed = [canonical(name) for name in listed]
    profile = replace(profile, own=tuple(dict.fromkeys(name for name in listed if is_path(name))))
    for name in profile.own:
        method_class(name)  # raises here, also where the experiment has no row for it
    wanted = {*listed} | ({*METHODS} if "all" in listed else set()) | ({*PAPER_METHODS, CONTROL} if "paper" in listed else set())
    keep = {REFERENCE, *wanted} | ({"influence"} if experiment.name == "fig-influence" and "paper" in listed else set())
    planned = [entry for entry in experiment.entries(profile) if entry.cell.method["name"] in keep]
    return [entry for entry in planned if all(word in entry.cell.label.split() for word in only)]
