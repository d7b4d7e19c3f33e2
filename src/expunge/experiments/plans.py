"""Plan the paper's tables and figures as lists of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from expunge.errors import InputError
from expunge.experiments import forgetting
from expunge.experiments.cells import REFERENCE
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import (
    CATEGORY,
    CONTROL,
    FORGET_ALONE,
    OTHERS,
    PAPER_METHODS,
    SHARES,
    Entry,
    accepts,
    cells,
    methods,
    original_row,
    readings_of,
)
from expunge.experiments.profiles import Profile, Settings
from expunge.methods import METHODS
from expunge.methods.lookup import FORMS, canonical, is_path, method_class
from expunge.vision.recipes import recipe_for

RATIOS = (0.15, 0.20, 0.25)
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


@dataclass(frozen=True)
class Experiment:
    """`views` name the tables of the results; see `report.views.VIEWS`."""

    name: str
    title: str
    views: tuple[str, ...]
    entries: Callable[[Profile], Iterator[Entry]]


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
    yield from original_row(profile, scenario, "")
    for name, reading in listed:
        if accepts(name, reading, "ratio") is None:
            for cell in cells(profile, model, scenario, name, reading):
                yield Entry(cell, model, "", name)
    for ratio in RATIOS:
        for name, reading in listed:
            if accepts(name, reading, "ratio") is not None:
                for cell in cells(profile, model, scenario, name, reading, ratio):
                    yield Entry(cell, model, f"ratio {ratio:.2f}", name)


def _table4(profile: Profile) -> Iterator[Entry]:
    model = profile.models[0]
    for share in SHARES:
        scenario, section = {"kind": "mislabelled", "fraction": share}, f"{100 * share:.0f} %"
        yield from original_row(profile, scenario, section)
        for name, reading in methods(profile.own, without=("tf-idf-mask", "fisher-noise", "newton-noise", "influence", CONTROL)):
            for cell in cells(profile, model, scenario, name, reading):
                yield Entry(cell, model, section, name)


def _table5(profile: Profile) -> Iterator[Entry]:
    model, needing = profile.models[0], {*OTHERS, REFERENCE, "finetune", "fisher-noise"} - {CONTROL, *FORGET_ALONE}
    yield from original_row(profile, CATEGORY, "")
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
            for reading in readings_of(name):
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
            for reading in readings_of(name):
                for cell in cells(profile, model, CATEGORY, name, reading):
                    if rate is None:
                        yield Entry(cell, model, "replayed", name)
                    else:
                        constant = {"schedule": "constant", "rate": rate, "epochs": profile.tuning_epochs}
                        yield Entry(replace(cell, tuning=constant), model, f"constant {rate:g}", name)


def _ratio(profile: Profile) -> Iterator[Entry]:
    model = profile.models[0]
    for ratio in profile.ratios:
        for reading in readings_of("fisher-mask"):
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
        Experiment("forget", "Forget as retraining does", ("forgetting",), forgetting.planned),
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
    keep = {REFERENCE, ORIGINAL, *wanted} | ({"influence"} if experiment.name == "fig-influence" and "paper" in listed else set())
    planned = [entry for entry in experiment.entries(profile) if entry.cell.method["name"] in keep]
    return [entry for entry in planned if all(word in entry.cell.label.split() for word in only)]
