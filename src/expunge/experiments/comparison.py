"""Every method on the same network, that knows the digits and must forget some: accuracies, and the measures beside the retrained one's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam

from expunge import metrics
from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.errors import ExpungeError, InputError
from expunge.experiments import own_methods as own
from expunge.experiments.demo import Accuracies, chosen, network, recipe
from expunge.methods import METHODS, Method, Retrain, Run
from expunge.methods.lookup import FORMS, is_path, told_apart
from expunge.methods.readings import readings
from expunge.metrics import Predictions, Relearned, Relearning, Stability
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import Outcome, unlearn
from expunge.vision.datasets.digits import Digits
from expunge.vision.scenarios import Scenario, category, limited, mislabelled, poisoned, subset
from expunge.vision.scenarios.rows import length

REFERENCE = "retrain"
CHOSEN = "fisher-mask-chosen"
RELEARNING = Relearning(Tuning(Constant(0.01, 30), batch_size=32))


@dataclass(frozen=True)
class Measures:
    """Of one network, on the test data by name; agreement and divergence (KL) are with the retrained network."""

    accuracies: Accuracies
    attack: float | None
    agreement: Mapping[str, float]
    divergence: Mapping[str, float]
    relearned: Relearned


@dataclass(frozen=True)
class Row:
    """One method: after its edit alone (None where it only trains), and at `epoch`, of so many `epochs` (0: none were trained).

    The epoch is the best on validation data; the retrained network's is the last. `seconds` are those up to it.
    """

    name: str
    setting: str
    masked: Accuracies | None
    epoch: int
    epochs: int
    measures: Measures
    stability: Stability | None
    seconds: float
    model: nn.Module


@dataclass(frozen=True)
class Refused:
    """A method that cannot work here, and why."""

    name: str
    reason: str


def names(asked: Sequence[str]) -> tuple[str, ...]:
    """Methods by name or path; "all" is every one of METHODS and the chosen FisherMask, "released" every reading of released programs.

    A path is followed by -released or another for a reading, as a name is: `package.module:Class-released`.
    """
    every = {name: None for key in METHODS for name in ((key, CHOSEN) if key == "fisher-mask" else (key,))}
    released = {name: None for name in _builders() if name not in METHODS}
    groups = {"all": every, "released": released}
    rule = f"must be all, released, or some of {', '.join([*every, *released])}; of your own {FORMS}"
    if not asked:
        raise InputError("methods", rule, "none")
    found: dict[str, None] = {}
    for name in asked:
        if is_path(name):
            own.builder(name)  # refused before the work
        elif name not in groups and name not in every and name not in released:
            raise InputError("methods", rule, name)
        found |= groups.get(name, {own.canonical(name): None})
    return tuple(found)


def _builders() -> dict[str, tuple[str, Callable[..., Method]]]:
    """The key of METHODS and the constructor behind each name: the key itself for the text's reading, with -released or another else."""
    return {
        key if reading == "text" else f"{key}-{reading}": (key, build)
        for key, kind in METHODS.items()
        for reading, build in readings(kind).items()
    }


def scenario_of(
    data: Digits,
    kind: str,
    label: Sequence[int] | None = None,
    n: int | None = None,
    trigger: int | None = None,
    fraction: float | None = None,
    remain_fraction: float | None = None,
    remain: bool = True,
    seed: int = 0,
) -> Scenario:
    """A scenario of the digits; what belongs to another kind is refused, what is None has a default."""
    belongs = {"label": "category", "n": "poisoned", "trigger": "poisoned", "fraction": "mislabelled or subset"}
    for argument, value in (("label", label), ("n", n), ("trigger", trigger), ("fraction", fraction)):
        if value is not None and kind not in belongs[argument]:
            raise InputError(argument, f"is for the scenario {belongs[argument]}", kind)
    if remain_fraction is not None and not remain:
        raise InputError("remain_fraction", "is for remain data, of which there are none", remain_fraction)
    parts: dict[str, Any] = {"test": data.test, "validation": data.validation}
    if kind == "category":
        found = category(data.train, [0] if label is None else label, **parts)
    elif kind == "poisoned":
        white = float(data.train.tensors[0].max())
        found = poisoned(data.train, 60 if n is None else n, 2 if trigger is None else trigger, value=white, seed=seed, **parts)
    elif kind == "mislabelled":
        found = mislabelled(data.train, 0.1 if fraction is None else fraction, seed=seed, **parts)
    elif kind == "subset":
        found = subset(data.train, fraction=0.05 if fraction is None else fraction, seed=seed, **parts)
    else:
        raise InputError("scenario", "must be category, poisoned, mislabelled or subset", kind)
    if not remain:
        return limited(found, count=0)
    if remain_fraction is None:
        return found
    try:
        return limited(found, fraction=remain_fraction, seed=seed)
    except InputError as error:
        rule = f"must be a share of the {length(data.train)} training samples, of which {length(found.retrain)} remain"
        raise InputError("remain_fraction", rule, remain_fraction) from error


def settings(name: str, scenario: Scenario, tuning_epochs: int, seed: int = 0) -> dict[str, Any]:
    """What suits the digits in place of a method's defaults, which belong to larger data; a method not named here keeps them.

    Rates and strengths are the best of a small grid on validation data: benchmarks/settings_on_digits.py.
    Whatever edits weights at once is fine-tuned alike afterwards, by the training's schedule replayed, unless there is no remain data.
    """
    replayed = recipe(tuning_epochs, seed)
    after = None if scenario.remain is None else replayed

    def steady(rate: float, **other: Any) -> Tuning:
        return replace(replayed, schedule=Constant(rate, tuning_epochs), weight_decay=5e-4, **other)

    suited: dict[str, dict[str, Any]] = {
        "fisher-mask": {"tuning": after},
        "random-mask": {"seed": seed, "tuning": after},
        "activation-mask": {"tuning": after},
        "tf-idf-mask": {"tuning": after},
        "fisher-noise": {"seed": seed, "tuning": after},
        "newton-noise": {"seed": seed, "tuning": after},
        "influence": {"gradient": "sum", "strength": 30, "tuning": after},
        "ssd": {"threshold": ssd_threshold(scenario), "tuning": after},
        "gradient-ascent": {"tuning": steady(3e-3)},
        "neg-grad-plus": {"remain_weight": 0.9, "tuning": steady(0.03, momentum=0.0)},
        "random-labels": {"tuning": steady(1e-3, optimizer=Adam)},
        "salun": {"tuning": steady(0.013)},
        "bad-teacher": {"tuning": steady(3e-4, optimizer=Adam)},
        "scrub": {"forget_batch_size": replayed.batch_size, "tuning": steady(5e-3)},
        "finetune": {"tuning": replayed},
    }
    return suited.get(name, {})


def ssd_threshold(scenario: Scenario, against_remain: float = 10.0) -> float:
    """SSD's α for a threshold on the ratio to the remain data, so always below its ceiling n/n_f: see docs/dampening.md."""
    remain = 0 if scenario.remain is None else len(scenario.remain)
    samples = len(scenario.forget) + remain
    return against_remain * samples / (remain + against_remain * len(scenario.forget))


def method(name: str, model: nn.Module, scenario: Scenario, epochs: int, tuning_epochs: int, seed: int = 0) -> Method:
    """A method by the name the command line knows it by, with the settings for the digits."""
    if name == REFERENCE:
        return Retrain(recipe(epochs, seed), fresh=network)
    if name == CHOSEN:
        if scenario.remain is None:
            raise InputError("remain", "the choice of λ needs the data to keep", "None")
        return chosen(model, scenario, recipe(tuning_epochs, seed))
    if is_path(name):
        return own.method(name, scenario, recipe(tuning_epochs, seed))
    key, build = _builders()[name]
    given = settings(key, scenario, tuning_epochs, seed)
    return build(**{field: value for field, value in given.items() if field in signature(build).parameters})


def rows(
    model: nn.Module, scenario: Scenario, methods: Sequence[str], epochs: int, tuning_epochs: int, seed: int = 0
) -> Iterator[Row | Refused]:
    """The network before, the retrained one, then every method by its name. Retraining comes first: the rest is held against it."""
    told = {"epochs": epochs, "tuning_epochs": tuning_epochs, "seed": seed}
    retraining = method(REFERENCE, model, scenario, **told)
    retrained = unlearn(model, scenario.forget, scenario.retrain, retraining, watch=scenario.watch, progress=False)
    reference = predictions(retrained.model, scenario)
    yield Row("before", "", None, 0, 0, measures(model, model, scenario, reference), None, 0.0, model)
    found = measures(retrained.model, model, scenario, reference)
    yield _row(REFERENCE, retrained, len(retrained.epochs) - 1, found)
    labels = told_apart(["before", REFERENCE, *methods], own.short)
    for name in methods:
        if name == REFERENCE:
            continue
        try:
            started = time.perf_counter()
            kept = Kept(method(name, model, scenario, **told))
            preparing = time.perf_counter() - started
            outcome = unlearn(model, scenario.forget, scenario.remain, kept, watch=scenario.watch, progress=False)
            epoch = metrics.best_epoch(outcome.history).epoch
            outcome.model.load_state_dict(kept.weights[epoch])
            found = measures(outcome.model, model, scenario, reference)
            yield _row(labels[name], replace(outcome, method=kept.method), epoch, found, preparing)
        except ExpungeError as error:
            yield Refused(labels[name], str(error))


def measures(model: nn.Module, original: nn.Module, scenario: Scenario, reference: Mapping[str, Predictions]) -> Measures:
    """All that is told of a network; `reference` is what the retrained one says."""
    said = predictions(model, scenario)
    return Measures(
        Accuracies(metrics.accuracy_of(said["remain"]), metrics.accuracy_of(said["forget"])),
        metrics.attack_success(said["attack"]) if "attack" in said else None,
        {name: metrics.agreement(each, reference[name]) for name, each in said.items()},
        {name: metrics.divergence(each, reference[name]) for name, each in said.items()},
        metrics.relearn_time(model, original, scenario.forget, scenario.train, RELEARNING, progress=False),
    )


def predictions(model: nn.Module, scenario: Scenario) -> dict[str, Predictions]:
    return {name: metrics.logits(model, data) for name, data in scenario.tests.items()}


class Kept:
    """A method, and the weights after each of its epochs: `unlearn` gives the last ones."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.weights: list[dict[str, Tensor]] = []

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch | None:
        def after_epoch(epoch: int) -> None:
            self.weights.append({name: value.clone() for name, value in model.state_dict().items()})
            run.after_epoch(epoch)

        keeping = replace(run, after_epoch=after_epoch)
        edit = self.method(model, forget, remain, keeping)
        keeping.begin()  # where the method made no record
        return edit


def _row(name: str, outcome: Outcome, epoch: int, found: Measures, preparing: float = 0.0) -> Row:
    history = outcome.epochs
    first = history[0].accuracies
    return Row(
        name,
        re.sub(r" at 0x\w+", "", repr(outcome.method)),  # where a function was, which differs from run to run
        None if outcome.edit is None else Accuracies(first["remain"], first["forget"]),
        epoch,
        len(history) - 1,
        found,
        metrics.stability(history) if len(history) > 2 else None,
        history[epoch].seconds + preparing,
        outcome.model,
    )
