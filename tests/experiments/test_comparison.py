"""Methods side by side: who runs in which scenario, what is told of each, and how it is put on paper."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.data import TensorDataset

from expunge import metrics
from expunge.errors import DivergedError, InputError
from expunge.experiments import comparison, demo
from expunge.experiments.comparison import CHOSEN, REFERENCE, Measures, Refused, Row
from expunge.experiments.demo import Accuracies
from expunge.methods import METHODS, SSD
from expunge.metrics import Relearned, Relearning, Stability
from expunge.report import comparison as comparison_report
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import Digits, digits
from expunge.vision.networks import resnet8
from expunge.vision.scenarios import limited

SCENARIOS = {
    "category": lambda data: comparison.scenario_of(data, "category", label=[3]),
    "poisoned": lambda data: comparison.scenario_of(data, "poisoned", n=20),
    "mislabelled": lambda data: comparison.scenario_of(data, "mislabelled"),
    "subset": lambda data: comparison.scenario_of(data, "subset"),
    "few remain data": lambda data: comparison.scenario_of(data, "category", remain_fraction=0.1),
    "no remain data": lambda data: comparison.scenario_of(data, "category", remain=False),
}
CLASSES_ONLY = {"tf-idf-mask", "tf-idf-mask-released"}
WITHOUT_REMAIN = {"fisher-mask", "random-mask", "activation-mask", "mask-classifier", "gradient-ascent", REFERENCE} | {
    "fisher-mask-released",
    "random-mask-released",
    "activation-mask-released",
}
EVERY = set(comparison.names(["all", "released"])) - {"influence-released"}  # it may diverge, as any LiSSA
REFUSED = {
    "category": set(),
    "poisoned": CLASSES_ONLY,
    "mislabelled": CLASSES_ONLY | {"mask-classifier"},
    "subset": CLASSES_ONLY | {"mask-classifier"},
    "few remain data": set(),
    "no remain data": EVERY - WITHOUT_REMAIN,
}


TRAINERS = {"before", "finetune", REFERENCE, "gradient-ascent", "neg-grad-plus", "random-labels", "salun", "salun-released"} | {
    "bad-teacher",
    "scrub",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A narrow network, and re-learning that is soon given up."""
    for module in (demo, comparison):
        monkeypatch.setattr(module, "network", lambda: resnet8(10, channels=1, width=4))
    monkeypatch.setattr(comparison, "RELEARNING", Relearning(Tuning(Constant(0.05, 1))))


@pytest.fixture(scope="module")
def data() -> Digits:
    """A few of the digits, of every class alike."""
    return Digits(*(TensorDataset(*(tensor[::6] for tensor in part.tensors)) for part in digits()))


@pytest.mark.parametrize("kind", SCENARIOS)
def test_every_method_runs_where_it_is_meant_to_and_says_no_elsewhere(kind, data):
    scenario = SCENARIOS[kind](data)
    model = demo.trained(scenario.train, 2)
    found = list(comparison.rows(model, scenario, sorted(EVERY), epochs=1, tuning_epochs=1))
    refused = {each.name: each.reason for each in found if isinstance(each, Refused)}
    assert refused.keys() == REFUSED[kind]
    assert [each.name for each in found][:2] == ["before", REFERENCE] and {each.name for each in found} == EVERY | {"before"}
    if kind == "no remain data":
        assert all("needs the data to keep" in reason for reason in refused.values())
    for row in found:
        if isinstance(row, Row):
            assert all(bool(torch.isfinite(value).all()) for value in row.model.state_dict().values())
            assert (row.measures.attack is not None) == (kind == "poisoned")
            assert (row.masked is None) == (row.name in TRAINERS)


def test_names_are_methods_readings_and_groups():
    assert set(comparison.names(["all"])) == {*METHODS, CHOSEN}
    assert "ssd-released" in comparison.names(["released"]) and "scrub-released" not in EVERY
    assert comparison.names(["ssd", "finetune", "ssd"]) == ("ssd", "finetune")
    for unknown in ("nonsense", "scrub-released"):
        with pytest.raises(InputError, match=f"^methods: must be all, released, or some of fisher-mask, .*; found {unknown}"):
            comparison.names(["all", unknown])


def test_a_new_method_is_compared_with_its_defaults(data, monkeypatch):
    monkeypatch.setitem(METHODS, "fading", Fading)
    monkeypatch.setitem(METHODS, "broken", Broken)
    scenario = SCENARIOS["category"](data)
    model = demo.trained(scenario.train, 1)
    names = [name for name in comparison.names(["all"]) if name in ("fading", "broken")]
    *_, fading, broken = comparison.rows(model, scenario, names, epochs=1, tuning_epochs=1)
    assert fading.setting == "Fading(steps=4)" and broken == Refused("broken", "no longer finite")


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


def test_a_row_is_the_network_of_the_epoch_best_on_validation_data(data, monkeypatch):
    monkeypatch.setitem(METHODS, "fading", Fading)
    scenario = SCENARIOS["category"](data)
    model = demo.trained(scenario.train, 4)
    before, retrained, row = comparison.rows(model, scenario, ["fading"], epochs=2, tuning_epochs=1)
    history = unlearn(model, *scenario, Fading(), watch=scenario.watch).epochs
    assert row.epoch == metrics.best_epoch(history).epoch == 1 and row.epochs == 4
    assert row.masked is None and row.stability == metrics.stability(history)
    assert bool(row.model.classifier.weight.any())
    told = row.measures
    assert {"remain": told.accuracies.remain, "forget": told.accuracies.forget} == {
        name: history[1].accuracies[name] for name in ("remain", "forget")
    }
    said, reference = (metrics.logits(each.model, scenario.tests["forget"]) for each in (row, retrained))
    assert told.agreement["forget"] == metrics.agreement(said, reference)
    assert told.divergence["forget"] == metrics.divergence(said, reference)
    assert retrained.measures.agreement == {"remain": 1, "forget": 1} and set(retrained.measures.divergence.values()) == {0}
    assert retrained.epoch == retrained.epochs == 2
    assert before.model is model and before.measures.relearned.epochs == 0


def test_the_reference_has_all_remain_data_however_few_the_others_have(data):
    whole = SCENARIOS["category"](data)
    found = []
    for scenario in (whole, limited(whole, count=8)):
        _, retrained = comparison.rows(demo.trained(whole.train, 1), scenario, [REFERENCE], epochs=2, tuning_epochs=1)
        found.append(retrained.model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_ssd_has_a_threshold_that_can_be_reached(data):
    for kind in SCENARIOS:
        scenario = SCENARIOS[kind](data)
        kept = 0 if scenario.remain is None else len(scenario.remain)
        threshold, ceiling = comparison.ssd_threshold(scenario), (kept + len(scenario.forget)) / len(scenario.forget)
        assert threshold <= ceiling and (kept == 0 or threshold < ceiling)
        # F̄_f = 10 F̄_r is just where the two ways to say it meet.
        mean = (len(scenario.forget) * 10.0 + kept) / (kept + len(scenario.forget))
        assert 10.0 / mean == pytest.approx(threshold)
    scenario = SCENARIOS["category"](data)
    model = demo.trained(scenario.train, 3)
    changed = {
        threshold: len(unlearn(model, *scenario, SSD(threshold), watch={}).patch)
        for threshold in (10.0, comparison.ssd_threshold(scenario))
    }
    assert 50 * changed.pop(10.0) < min(changed.values())


def test_choosing_masks_nothing_where_every_mask_does_harm(data, monkeypatch):
    scenario = SCENARIOS["mislabelled"](data)
    model = demo.trained(scenario.train, 3)
    monkeypatch.setattr(demo, "accuracy", lambda model, data: 0.5 if bool((model.stage3[0].conv2.weight == 0).any()) else 0.9)
    assert demo.chosen(model, scenario, None).ratio == 0


@pytest.mark.parametrize(
    "kind, given, message",
    [
        ("subset", {"label": [3]}, "label: is for the scenario category; found subset"),
        ("category", {"n": 5}, "n: is for the scenario poisoned; found category"),
        ("mislabelled", {"trigger": 2}, "trigger: is for the scenario poisoned"),
        ("category", {"fraction": 0.1}, "fraction: is for the scenario mislabelled or subset"),
        ("category", {"remain": False, "remain_fraction": 0.1}, "remain_fraction: is for remain data, of which there are none; found 0.1"),
        ("category", {"label": [12]}, "label: must occur in the dataset; found 12"),
        ("nonsense", {}, "scenario: must be category, poisoned, mislabelled or subset; found nonsense"),
    ],
)
def test_options_of_another_scenario_are_refused(kind, given, message, data):
    with pytest.raises(InputError, match=f"^{message}"):
        comparison.scenario_of(data, kind, **given)


def test_several_labels_and_few_remain_data(data):
    scenario = comparison.scenario_of(data, "category", label=[3, 5], remain_fraction=0.05)
    assert {int(label) for _, label in scenario.forget} == {3, 5} and len(scenario.remain) == round(0.05 * len(data.train))


def row(name: str, **other) -> Row:
    told = Measures(
        Accuracies(0.98, 0.01), None, {"remain": 0.97, "forget": 0.4}, {"remain": 0.123, "forget": 1.5}, Relearned(None, 7, 0, ())
    )
    made = Row(name, "M()", Accuracies(0.9, 0.5), 2, 5, told, Stability(0.1, 0.2, 0.034), 1.234, resnet8(10, channels=1, width=4))
    return replace(made, **other)


def test_the_table_says_all_of_a_row():
    before = row("before", masked=None, epoch=0, epochs=0, stability=None, seconds=0.0)
    still = row("mask-classifier", epoch=0, epochs=0, stability=None)
    lines = comparison_report.table([before, row(REFERENCE), row("ssd"), still]).splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["before", "ssd", "mask-classifier", REFERENCE]
    assert lines[-3].split() == "ssd 90.0 50.0 60.0 98.0 1.0 97.0 2/5 3.4 >7 97.0 40.0 0.12 1.50 1.23".split()
    assert lines[-4].split() == "before 98.0 1.0 97.0 >7 97.0 40.0 0.12 1.50".split()
    assert lines[-2].split() == "mask-classifier 90.0 50.0 60.0 >7 97.0 40.0 0.12 1.50 1.23".split()
    assert "attack" not in lines[0] and "\x1b" not in "".join(lines)


def test_the_table_shows_attacks_where_there_are_some_and_never_cuts_a_number(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = comparison_report.table([row("ssd", measures=replace(row("").measures, attack=0.123))], terminal=True)
    assert "attack" in shown and "12.3" in shown and "1.23" in shown and "…" not in shown and "\x1b[" in shown


def test_notes_say_what_is_missing_and_what_to_expect(data):
    scenario = SCENARIOS["subset"](data)
    said = comparison_report.notes(scenario, [row(CHOSEN), Refused("ssd", "remain: none")])
    assert scenario.reference in said and "not here: ssd: remain: none" in said and "chosen on validation data" in said
    assert f"{CHOSEN}:" in said and f"{CHOSEN}:" not in comparison_report.notes(scenario, [row("ssd")])


@pytest.mark.parametrize("models", [True, False])
def test_what_is_saved(models, data, tmp_path):
    found = [row("before", masked=None), row(REFERENCE), row("ssd"), Refused("scrub", "no")]
    folder = comparison_report.save(tmp_path / "deep", {"seed": 1}, SCENARIOS["no remain data"](data), found, False, models)
    result = json.loads((folder / "result.json").read_text())
    assert [each["name"] for each in result["rows"]] == ["before", "ssd", REFERENCE] and result["refused"] == {"scrub": "no"}
    assert result["finished"] is False and result["scenario"]["remain"] == 0 and result["settings"] == {"seed": 1}
    assert result["rows"][1]["final"] == {"remain": 0.98, "forget": 0.01, "unlearn_score": pytest.approx(0.98 / 1.01)}
    assert result["rows"][1]["masked"]["forget"] == 0.5 and result["rows"][1]["relearn"]["epochs"] is None
    assert (folder / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert {path.stem for path in folder.glob("*.safetensors")} == ({"before", "ssd", REFERENCE} if models else set())


def test_any_number_of_methods_can_be_drawn(data):
    assert comparison_report.picture(SCENARIOS["subset"](data), [row(f"method-{index}") for index in range(80)])
