"""The table of forgetting: its cells, what they share with the paper's tables, and the evidence they hold."""

from dataclasses import replace

import pytest
import torch

from expunge import metrics
from expunge.data.batches import measuring_size
from expunge.errors import InputError
from expunge.experiments import construction, results
from expunge.experiments.networks import original, retrained
from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.profiles import PAPER
from expunge.experiments.runner import run
from expunge.methods import METHODS, ByFisher, ResetAndDistil
from expunge.training import Constant, Distillation, OneCycle, Tuning
from tests.experiments.tiny import TINY, place, tasks

PROFILE = replace(TINY, evidence={"rate": 0.02, "epochs": 2})
MODEL = replace(PAPER, models=("cifar10/resnet20", "mnist/vgg16"))
FEW = ("reset-and-distil",)


def planned(profile=MODEL):
    return entries(EXPERIMENTS["forget"], profile)


def test_every_scenario_is_there_and_every_method_can_be_built():
    members = planned()
    sections = list(dict.fromkeys((entry.block, entry.section) for entry in members))
    assert [section for block, section in sections if block == "cifar10/resnet20"] == [
        "a class",
        "5 % of the samples",
        "poison",
        "10 % wrong labels",
        "30 % wrong labels",
        "50 % wrong labels",
        "a class, no remain data",
        "a class, 0.1 % remain data",
    ]
    assert [section for block, section in sections if block == "mnist/vgg16"] == ["a class"]
    for block, section in sections:
        rows = [entry.row for entry in members if (entry.block, entry.section) == (block, section)]
        assert rows[:3] == ["original"] * 3 and rows[3:6] == ["retrain"] * 3
    for entry in members:
        if entry.cell.method["name"] not in ("original", "retrain"):
            method = construction.method_of(entry.cell)
            own = getattr(METHODS[entry.cell.method["name"]](), "tuning", None)  # of MSG and SFRon, which keep their schedule
            assert method.tuning == construction.tuning_of(entry.cell, own)
    # Rows of a table are told apart by these.
    keys = [(entry.block, entry.section, entry.row, entry.cell.method["reading"], entry.setting, entry.cell.seed) for entry in members]
    assert len({*keys}) == len(keys)


def test_the_epochs_of_a_methods_own_schedule_are_its_own():
    cell = next(entry.cell for entry in planned() if (entry.cell.tuning or {}).get("schedule") == "own")
    assert construction.tuning_of(replace(cell, tuning={"schedule": "own"}), Tuning(Constant(0.1, epochs=3))).schedule.epochs == 3
    with pytest.raises(InputError, match="tuning: of the method's own schedule has 3 epochs; leave epochs out; found 4"):
        construction.tuning_of(replace(cell, tuning={"schedule": "own", "epochs": 4}), Tuning(Constant(0.1, epochs=3)))


def test_settings_become_those_of_the_method():
    cells = {
        entry.setting: entry.cell for entry in planned() if entry.section in ("a class", "50 % wrong labels") and entry.cell.seed == 777
    }
    by_fisher, fresh = (construction.method_of(cells[setting]) for setting in ("60 % by Fisher", "all weights"))
    assert isinstance(by_fisher, ResetAndDistil) and by_fisher.reset == ByFisher(0.6)
    assert fresh.reset == 1.0 and fresh.tuning.schedule == OneCycle(0.1, 10) and fresh.tuning.weight_decay == 1e-3
    distilled = construction.method_of(cells["distilled"])
    assert distilled.tuning.distillation == Distillation() and distilled.tuning.seed == 777
    # The peak of the one cycle is the recipe's rate.
    mnist = next(entry.cell for entry in planned() if entry.block == "mnist/vgg16" and entry.setting == "last third")
    assert construction.method_of(mnist).tuning.schedule == OneCycle(0.01, 5)


def test_what_the_papers_tables_have_is_not_run_again():
    elsewhere = {entry.cell.digest for name in ("table3", "table4", "table5") for entry in entries(EXPERIMENTS[name], MODEL)}
    shared = [entry for entry in planned() if entry.cell.digest in elsewhere]
    assert {entry.section for entry in shared} >= {"poison", "10 % wrong labels", "50 % wrong labels", "a class, 0.1 % remain data"}
    assert all(entry.cell.evidence is None for entry in shared)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A class and some samples to forget; the networks retrained without the samples are not trained."""
    here = replace(place(tmp_path_factory.mktemp("bench")), retrained=False)
    asked = [task for task in tasks("forget", FEW, PROFILE) if task.cell.evidence is not None]
    asked = [task for task in asked if (task.cell.scenario["kind"], task.cell.method["name"]) != ("subset", "retrain")]
    assert run(asked, here) == 0
    return here, {result.digest: result for result in results.load(here.folder)}


def of(found, kind, name, **settings):
    members = [one for one in found.values() if one.cell.scenario["kind"] == kind and one.cell.method["name"] == name]
    return next(one for one in members if all(one.cell.method.get(key) == value for key, value in settings.items()))


def test_the_evidence_is_that_of_the_metrics(done):
    here, found = done
    for name, spec in (("original", original), ("retrain", retrained)):
        result = of(found, "category", name)
        assert result.error is None
        images = construction.parts("digits", PROFILE.validation, None, torch.device("cpu"))
        scenario = construction.scenario_of(result.cell.scenario, images, result.cell.seed)
        network = here.store.load(spec(result.cell))
        size = measuring_size(network)
        seen, unseen = (metrics.logits(network, data, batch_size=size) for data in (scenario.forget, scenario.tests["forget"]))
        assert result.evidence.loss_attack == pytest.approx(metrics.loss_attack(seen, unseen))
        probes = metrics.linear_probes(network, ["stage1", "stage2", "stage3"], images.train, images.test)
        assert result.evidence.probes == pytest.approx({probe.module: probe.recall[0] for probe in probes}, abs=0.05)
        assert result.evidence.relearn_losses[0] == pytest.approx(metrics.mean_loss(seen))
        assert result.evidence.relearn_unseen[0] == metrics.accuracy_of(unseen)
        assert len(result.evidence.relearn_losses) == len(result.evidence.relearn_accuracies) == 3
    assert of(found, "category", "retrain").evidence.relearn_accuracies[0] == 0


def test_samples_have_the_loss_attack_alone(done):
    evidence = of(done[1], "subset", "reset-and-distil", reset=0.35).evidence
    assert 0 <= evidence.loss_attack <= 1 and evidence.probes == {} and evidence.relearn_losses == ()


def test_a_cell_can_do_without_the_retrained_network(done):
    here, found = done
    without, beside = of(found, "subset", "reset-and-distil"), of(found, "category", "reset-and-distil")
    assert without.error is None and without.retrained is None and without.agreement is None and "retrained" not in without.weights
    assert not here.store.holds(retrained(without.cell))
    assert beside.retrained is not None and beside.agreement is not None  # the row of the retrained network had it trained


def test_the_network_is_that_of_the_last_epoch(done):
    """Nothing is chosen on the test set: the measures are not those of the epoch that is best there."""
    result = of(done[1], "category", "reset-and-distil", reset=0.35)
    assert result.last.epoch == 5
    share = result.class_accuracies["after"][0]
    assert share == pytest.approx(result.last.forget)
    remain = [value for label, value in enumerate(result.class_accuracies["after"]) if label]
    assert min(remain) <= result.last.remain <= max(remain)
