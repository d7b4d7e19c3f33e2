"""Build the cells of a method on a model and a scenario, one per seed, each with its place in a table."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from expunge.experiments.cells import CHOSEN, REFERENCE, Cell
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.profiles import Profile, Settings
from expunge.methods import METHODS
from expunge.methods.lookup import default_tuning, is_path, method_class
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
    "assd",
    "lfssd",
    "potion",
    "gradient-ascent",
    "mu-mis",
    "jit",
    "neg-grad-plus",
    "random-labels",
    "salun",
    "bad-teacher",
    "scrub",
    "msg",
    "sfron",
    "lotus",
    "reset-and-distil",
)
FORGET_ALONE = ("gradient-ascent", "mu-mis", "jit")  # read no remain data, so that some of them change nothing
DAMPENING = ("ssd", "lfssd")  # whose threshold has a ceiling
SCALED = ("reset-and-distil",)  # trained in one cycle up to the recipe's rate
OWN_RATIO = ("msg",)  # whose ratio is not the share of weights that the paper masks
REVISIONS = {  # of rules that were corrected, by method and reading: a cell without it is one of the rule before
    ("tf-idf-mask", "text"): 2,  # term frequency over channels, not over classes
    ("tf-idf-mask", "released"): 2,
    ("fisher-noise", "released"): 2,  # squared batch gradients; those of single samples are Golatkar's reading
    ("ssd", "released"): 2,  # data read class by class
}
REPLAYED = (Tuning(), Tuning(replay(Steps(), epochs=5)))  # a method of one's own with one of these is fine-tuned as the paper's are
CATEGORY = {"kind": "category", "label": 0}  # the paper removes the first
SHARES = (0.1, 0.3, 0.5)  # of wrong labels
CLASSES = {"cifar100": 100, "tiny-imagenet": 200}  # other datasets have 10


@dataclass(frozen=True)
class Entry:
    """A cell and its place: the block of its model, a section of the table, and the row, a method's name or "original" for w*.

    `setting` says what sets the row apart from others of that method.
    """

    cell: Cell
    block: str
    section: str
    row: str
    setting: str = ""


def accepts(name: str, reading: str, setting: str) -> Any:
    """The parameter of that setting, or None."""
    if name == ORIGINAL or (reading == CHOSEN and setting != "tuning"):
        return None
    return inspect.signature(readings(method_class(name))["text" if reading == CHOSEN else reading]).parameters.get(setting)


def readings_of(name: str) -> tuple[str, ...]:
    return tuple(readings(method_class(name)))


def share_of_retraining(method: str, epoch: int | None, epochs: int | None) -> float | None:
    """The cost of a method: its epochs over those of a retraining. None for methods whose epochs are over the forget data."""
    return None if epoch is None or not epochs or method in FORGET_ALONE else epoch / epochs


def methods(own: Sequence[str] = (), without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(name, reading), the paper's first, then every other of METHODS, then those of one's own."""
    names = [*PAPER_METHODS, *(name for name in METHODS if name not in PAPER_METHODS), *own]
    return [(name, reading) for name in names if name not in without for reading in readings_of(name)]


def _tuning(profile: Profile, name: str, reading: str) -> Settings | None:
    """The paper's methods, and others made for it, are fine-tuned alike by the schedule replayed; the rest trains in its own way."""
    if name == REFERENCE:
        return None
    if reading == "text" and "tuning" in profile.settings.get(name, {}):
        return {"epochs": profile.tuning_epochs, **profile.settings[name]["tuning"]}
    parameter = accepts(name, reading, "tuning")
    if parameter is None or (name not in PAPER_METHODS and parameter.default is None):
        return None
    own = None if name in PAPER_METHODS else default_tuning(readings(method_class(name))[reading])
    if name in PAPER_METHODS or own in REPLAYED:
        return {"schedule": "replayed", "epochs": profile.tuning_epochs}
    if name in SCALED and own is not None:
        return {"schedule": "one-cycle", "epochs": profile.tuning_epochs}
    return None if own is None else {"schedule": "own", "epochs": own.schedule.epochs}


def _revision(name: str, reading: str) -> int | str | None:
    """Of the rule, where it was corrected; a class of one's own says it by an attribute `revision`."""
    return getattr(method_class(name), "revision", None) if is_path(name) else REVISIONS.get((name, reading))


def _threshold(dataset: str, scenario: Settings) -> float:
    """A ratio of 10 to the remain data alone: those thresholds are to all data, where 1/f is the most, f the share to forget.

    F_f/F = ρ / (1 − f + ρ·f) at ρ = F_f/F_r (docs/dampening.md).
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
    if name not in OWN_RATIO and accepts(name, reading, "ratio") is not None:
        method["ratio"] = recipe.mask_ratio if ratio is None else ratio
    if reading == "text":
        method |= {setting: value for setting, value in profile.settings.get(name, {}).items() if setting != "tuning"}
        if name in DAMPENING:
            method.setdefault("threshold", _threshold(dataset, scenario))
    tuning = _tuning(profile, name, reading)
    if scenario.get("remain_count") == 0 and tuning is not None and tuning["schedule"] == "replayed" and name != "finetune":
        tuning = None  # Finetune is nothing else, and says so itself
    plain_recipe = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(recipe).items() if value is not None}
    for seed in profile.seeds:
        yield Cell(dataset, network, scenario, method, seed, plain_recipe, tuning, profile.validation, profile.precision)


def original_row(profile: Profile, scenario: Settings, section: str) -> Iterator[Entry]:
    """The row of w*, read off the cells of the retrained network."""
    for cell in cells(profile, profile.models[0], scenario, REFERENCE, "text"):
        yield Entry(cell, profile.models[0], section, ORIGINAL)
