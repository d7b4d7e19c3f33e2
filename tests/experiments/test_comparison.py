"""Methods side by side as cells: who runs in which scenario, what is asked for, and what is told of each."""

from dataclasses import dataclass, replace

import pytest
import torch

from expunge.errors import DivergedError, InputError
from expunge.experiments import comparison, construction
from expunge.experiments.cells import CHOSEN, REFERENCE
from expunge.experiments.choosing import chosen
from expunge.experiments.comparison import names, scenario_settings
from expunge.experiments.construction import parts, scenario_of
from expunge.experiments.networks import retrained
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import FORGET_ALONE
from expunge.experiments.runner import Place, Task, run
from expunge.methods import METHODS, SSD
from expunge.unlearning import unlearn
from expunge.vision.digits_network import trained
from expunge.vision.zoo import load_network
from tests.experiments.tiny import few_digits

CPU = torch.device("cpu")
SCENARIOS = {
    "category": scenario_settings("category", label=[3]),
    "poisoned": scenario_settings("poisoned", n=20),
    "mislabelled": scenario_settings("mislabelled"),
    "subset": scenario_settings("subset"),
    "few remain data": scenario_settings("category", remain_fraction=0.1),
    "no remain data": scenario_settings("category", remain=False),
}
EVERY = [method for method in names(["all", "released"]) if method != ("influence", "released")]  # it may diverge, as any LiSSA
WITHOUT_REMAIN = ("fisher-mask", "random-mask", "activation-mask", "mask-classifier", *FORGET_ALONE, ORIGINAL, REFERENCE)
REFUSED = {
    "poisoned": {"tf-idf-mask"},
    "mislabelled": {"tf-idf-mask", "mask-classifier", "potion"},  # Potion does not reach its goal
    "subset": {"tf-idf-mask", "mask-classifier", "potion"},
    "no remain data": {*METHODS} - {*WITHOUT_REMAIN},
}
TRAINERS = {
    ORIGINAL,
    "finetune",
    REFERENCE,
    *FORGET_ALONE,
    "neg-grad-plus",
    "random-labels",
    "salun",
    "bad-teacher",
    "scrub",
    "sfron",
    "lotus",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    few_digits(monkeypatch)
    yield
    construction.parts.cache_clear()


def images():
    return parts("digits", 0.2, None, CPU)


def done(folder, scenario, methods, epochs=1, keep=False, **settings):
    """Every cell of a comparison, by (method, reading)."""
    plan = comparison.comparison("compare", scenario, methods, epochs, 1, relearn={"rate": 0.05, "limit": 1}, **settings)
    place, lines = Place(folder, folder / "models", None, CPU, keep=keep), []
    broken = run([Task(entry.cell, ("compare",)) for entry in plan.entries], place, say=lines.append)
    assert broken == 0, [line for line in lines if line.startswith("BROKEN")]
    return {(entry.cell.method["name"], entry.cell.method["reading"]): place.result(entry.cell) for entry in plan.entries}


@pytest.mark.filterwarnings("ignore::expunge.errors.LostAccuracyWarning")  # of Potion, on a network that knows little
@pytest.mark.filterwarnings("ignore:LoTUS changed nothing")  # networks of one epoch do not know the wrong labels they should forget
@pytest.mark.filterwarnings("ignore::expunge.errors.UncheckedWarning")  # networks that were trained for one epoch are doubted
@pytest.mark.parametrize("kind", SCENARIOS)
def test_every_method_runs_where_it_is_meant_to_and_says_no_elsewhere(kind, tmp_path):
    results = done(tmp_path, SCENARIOS[kind], EVERY)
    assert [*results][0] == (ORIGINAL, "text") and [*results][-1] == (REFERENCE, "text") and {*results} >= {*EVERY}
    refused = {method for method, result in results.items() if result.error is not None}
    expected = {(name, reading) for name, reading in results if name in REFUSED.get(kind, set())}
    expected |= {("fisher-mask", CHOSEN)} if kind == "no remain data" else set()
    assert refused == expected
    if kind == "no remain data":
        assert all("needs the data to keep" in results[method].error for method in refused)
    for (name, _), result in results.items():
        if result.error is None:
            assert (result.attack is not None) == (kind == "poisoned")
            assert (result.masked is None) == (name in TRAINERS), name


def test_names_are_methods_readings_and_groups():
    assert {*names(["all"])} == {*((name, "text") for name in METHODS), ("fisher-mask", CHOSEN)}
    assert ("ssd", "released") in names(["released"]) and ("scrub", "released") not in EVERY
    assert names(["ssd", "finetune", "ssd"]) == (("ssd", "text"), ("finetune", "text"))
    for unknown in ("nonsense", "scrub-released"):
        with pytest.raises(InputError, match=f"^methods: must be all, released, or some of fisher-mask, .*; found {unknown}"):
            names(["all", unknown])


@dataclass(frozen=True)
class Fading:
    """Knows nothing of the class from epoch 1 on; from epoch 2 on it knows nothing at all."""

    steps: int = 4

    def __call__(self, model, forget, remain, run):
        run.after_epoch(0)
        label = int(run.objective.targets(next(iter(run.batches(forget, "forget"))))[0])
        with torch.no_grad():
            model.classifier.bias[label] = -1e4
            run.after_epoch(1)
            for epoch in range(2, self.steps + 1):
                model.classifier.weight.zero_()
                run.after_epoch(epoch)


@dataclass(frozen=True)
class Broken:
    def __call__(self, model, forget, remain, run):
        raise DivergedError("no longer finite")


def test_a_row_is_the_network_of_the_epoch_best_on_validation_data(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "fading", Fading)
    monkeypatch.setitem(METHODS, "broken", Broken)
    results = done(tmp_path, SCENARIOS["category"], names(["fading", "broken"]), epochs=4, keep=True)
    fading, before, again = (results[name, "text"] for name in ("fading", ORIGINAL, REFERENCE))
    assert results["broken", "text"].error == "diverged: no longer finite"
    assert fading.setting == "Fading(steps=4)" and fading.best.epoch == 1 and fading.last.epoch == 4
    assert fading.best.on == "validation" and (fading.best.remain, fading.best.forget) == (fading.history[1].remain, 0)
    network = load_network(tmp_path / "cells" / f"{fading.digest}.safetensors")
    assert bool(network.classifier.weight.any())  # that of epoch 1
    assert again.agreement_by == {"remain": 1, "forget": 1} and {*again.divergence_by.values()} == {0}
    assert again.best.epoch == 4 and again.work_seconds > 0
    assert before.relearn.epochs == 0 and before.weights["after"] == before.weights["before"] and before.best.epoch == 0


def test_the_reference_has_all_remain_data_however_few_the_others_have():
    specs = set()
    for scenario in (scenario_settings("category"), scenario_settings("category", remain_fraction=0.05)):
        plan = comparison.comparison("compare", scenario, names(["finetune"]), 1, 1)
        specs |= {retrained(entry.cell).digest for entry in plan.entries}
    assert len(specs) == 1


def ssd_threshold(scenario):
    plan = comparison.comparison("compare", scenario, names(["ssd", "lfssd"]), 1, 1)
    (threshold,) = {entry.cell.method["threshold"] for entry in plan.entries[1:3]}  # the same for both
    return threshold


@pytest.mark.filterwarnings("ignore:nothing was dampened")
def test_ssd_has_a_threshold_that_can_be_reached():
    for settings in SCENARIOS.values():
        scenario = scenario_of(settings, images(), 0)
        kept = 0 if scenario.remain is None else len(scenario.remain)
        threshold, ceiling = ssd_threshold(settings), (kept + len(scenario.forget)) / len(scenario.forget)
        assert threshold <= ceiling and (kept == 0 or threshold < ceiling)
        # F̄_f = 10 F̄_r is just where the two ways to say it meet.
        mean = (len(scenario.forget) * 10.0 + kept) / (kept + len(scenario.forget))
        assert 10.0 / mean == pytest.approx(threshold, abs=0.005)
    scenario = scenario_of(SCENARIOS["category"], images(), 0)
    model = trained(scenario.train, 3)
    changed = {
        threshold: len(unlearn(model, *scenario, SSD(threshold), watch={}).patch)
        for threshold in (10.0, ssd_threshold(SCENARIOS["category"]))
    }
    assert 50 * changed.pop(10.0) < min(changed.values())


def test_choosing_masks_nothing_where_every_mask_does_harm(monkeypatch):
    scenario = scenario_of(SCENARIOS["mislabelled"], images(), 0)
    model = trained(scenario.train, 3)
    harmed = "expunge.experiments.choosing.accuracy"
    monkeypatch.setattr(harmed, lambda model, data: 0.5 if bool((model.stage3[0].conv2.weight == 0).any()) else 0.9)
    assert chosen(model, scenario).ratio == 0


def test_choosing_needs_validation_data():
    scenario = scenario_of(SCENARIOS["category"], images(), 0)
    with pytest.raises(InputError, match="^validation: the choice of λ and R needs validation data"):
        chosen(trained(scenario.train, 1), replace(scenario, validation={}))


@pytest.mark.parametrize(
    "kind, given, message",
    [
        ("subset", {"label": [3]}, "label: is for the scenario category; found subset"),
        ("category", {"n": 5}, "n: is for the scenario poisoned; found category"),
        ("mislabelled", {"trigger": 2}, "trigger: is for the scenario poisoned"),
        ("category", {"fraction": 0.1}, "fraction: is for the scenario mislabelled or subset"),
        ("category", {"remain": False, "remain_fraction": 0.1}, "remain_fraction: is for remain data, of which there are none; found 0.1"),
        ("category", {"label": [12]}, "label: must occur in the dataset; found 12"),
        ("nonsense", {}, "scenario: kind must be category, poisoned, mislabelled or subset; found nonsense"),
    ],
)
def test_options_of_another_scenario_are_refused(kind, given, message):
    with pytest.raises(InputError, match=f"^{message}"):
        comparison.comparison("compare", scenario_settings(kind, **given), names(["ssd"]), 1, 1)


def test_several_labels_and_few_remain_data():
    plan = comparison.comparison("compare", scenario_settings("category", label=[3, 5], remain_fraction=0.05), names(["ssd"]), 1, 1)
    assert {int(label) for _, label in plan.scenario.forget} == {3, 5}
    assert len(plan.scenario.remain) == round(0.05 * len(images().train))
