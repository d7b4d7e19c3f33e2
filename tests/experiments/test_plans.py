"""Experiments are lists of cells; the same run is one cell wherever it is asked for, and networks are shared."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from expunge.errors import InputError
from expunge.experiments.cells import Cell
from expunge.experiments.construction import method_of
from expunge.experiments.networks import named, original, retrained
from expunge.experiments.planned_cells import OTHERS, PAPER_METHODS, REVISIONS, methods
from expunge.experiments.plans import EXPERIMENTS, chosen, entries
from expunge.experiments.profiles import PAPER, SMOKE, profile_of
from expunge.methods import METHODS
from expunge.storage.codec import decode, encode

RESULTS = Path(__file__).parents[2] / "results" / "paper" / "cells"
SECTIONS = ("no remain data", "0.1 % remain data")
ALL = {name: entries(experiment, PAPER) for name, experiment in EXPERIMENTS.items()}


def digests(name):
    return {entry.cell.digest for entry in ALL[name]}


def test_the_papers_methods_alone_are_fine_tuned_by_the_replayed_schedule():
    """Whatever the default of `Tuning` is."""
    replayed = {entry.cell.method["name"] for entry in ALL["table1"] if (entry.cell.tuning or {}).get("schedule") == "replayed"}
    assert replayed == {*PAPER_METHODS} - {"retrain"}
    assert all(method_of(entry.cell).tuning.schedule.rate(0) == 0.1 for entry in ALL["table1"] if entry.cell.method["name"] in replayed)


def test_a_cell_is_json_and_comes_back():
    for members in ALL.values():
        for entry in members:
            again = decode(Cell, json.loads(json.dumps(encode(entry.cell))))
            assert again == entry.cell and again.digest == entry.cell.digest


def test_every_setting_is_in_the_digest():
    cell = ALL["table1"][0].cell
    changes = {"dataset": "mnist", "network": "vgg16", "scenario": {"kind": "category", "label": 1}, "method": {"name": "finetune"}}
    changes |= {"seed": 5, "recipe": {**cell.recipe, "epochs": 3}, "tuning": {"schedule": "own"}, "validation": 0.1}
    changes |= {"precision": "float32", "relearn": {"rate": 0.1, "limit": 3}, "evidence": {"rate": 0.1, "epochs": 3}}
    assert changes.keys() == {field.name for field in fields(cell)}
    found = {replace(cell, **{name: value}).digest for name, value in changes.items()} | {cell.digest}
    assert len(found) == 1 + len(changes)


def test_what_two_experiments_need_is_one_cell():
    assert digests("table2") < digests("table1")
    assert len(digests("fig-influence") & digests("table1")) == 5 * 3  # Finetune, Influence and FisherMask, two of them in two readings
    assert len(digests("fig-schedule") & digests("table1")) == 5 * 3
    assert len(digests("fig-ratio") & digests("table1")) == 2 * 3
    assert not digests("fig-relearn") & digests("table1")  # these are measured further


def test_the_networks_are_few():
    cells = [entry.cell for members in ALL.values() for entry in members if entry.cell.dataset == "cifar10"]
    specs = {spec.digest for cell in cells for spec in (original(cell), retrained(cell))}
    # A seed's: all data, without class 0, without some samples, with poison, with wrong labels and without them at three shares. One seed
    # has two weight decays.
    assert len(specs) == 3 * (3 + 1 + 2 * 3) + 2 * 2


def test_clean_data_are_the_reference_of_poisoned_ones():
    poisoned, category = ALL["table3"][0].cell, ALL["table1"][0].cell
    assert retrained(poisoned).digest == original(category).digest != original(poisoned).digest


def test_limited_remain_data_change_no_network():
    for entry in ALL["table5"]:
        assert original(entry.cell).data == {"kind": "all"}
        assert retrained(entry.cell).data == {"kind": "category", "label": 0, "part": "retrain"}


def test_the_paper_is_all_there():
    table1 = [entry for entry in ALL["table1"] if entry.block == "cifar10/resnet20"]
    assert {entry.row for entry in table1} == {*METHODS}
    assert {entry.cell.seed for entry in table1} == {666, 777, 888}
    assert {entry.block for entry in ALL["table1"]} == {"cifar10/resnet20", "cifar100/googlenet"}
    assert {entry.section for entry in ALL["table3"]} == {"", "ratio 0.15", "ratio 0.20", "ratio 0.25"}
    assert {entry.section for entry in ALL["table4"]} == {"10 %", "30 %", "50 %"}
    assert {entry.section for entry in ALL["table5"]} == {"", "no remain data", "0.1 % remain data"}
    assert {entry.section for entry in ALL["fig-schedule"]} == {"replayed", "constant 0.1", "constant 0.01", "constant 0.001"}
    ratios = [entry.cell.method["ratio"] for entry in ALL["fig-ratio"]]
    assert min(ratios) == 0 and max(ratios) == 0.12
    assert "cifar100/resnet50_cifar" in {entry.block for entry in ALL["fig-influence"]}


def test_methods_that_read_no_remain_data_have_a_row_without_them_and_none_with_a_few():
    rows = {section: {(e.row, e.cell.method["reading"]) for e in ALL["table5"] if e.section == section} for section in SECTIONS}
    alone = {("gradient-ascent", "text"), ("mu-mis", "text"), ("jit", "text"), ("jit", "released")}
    assert alone <= rows["no remain data"] and not alone & rows["0.1 % remain data"]
    assert not {name for name, _ in rows["no remain data"]} & {"ssd", "salun", "scrub", "neg-grad-plus", "bad-teacher"}


def test_settings_of_the_digits_may_say_for_how_long():
    tunings = {entry.cell.method["name"]: entry.cell.tuning for entry in entries(EXPERIMENTS["table1"], SMOKE)}
    assert tunings["mu-mis"]["epochs"] == 40 and tunings["gradient-ascent"]["epochs"] == SMOKE.tuning_epochs == 5
    (cell, *_) = [entry.cell for entry in entries(EXPERIMENTS["table1"], SMOKE) if entry.cell.method["name"] == "mu-mis"]
    method = method_of(cell)
    assert (method.recovery, method.tuning.schedule.epochs, method.tuning.batch_size, method.tuning.eval_mode) == (1.75, 40, 64, True)


def test_all_methods_are_known_by_name():
    assert {*PAPER_METHODS, *OTHERS} == {*METHODS}


def test_all_readings_are_run_where_there_are_several():
    assert ("fisher-mask", "released") in methods() and ("finetune", "released") not in methods()
    assert [reading for name, reading in methods() if name == "fisher-noise"] == ["text", "released", "golatkar"]


def test_a_method_is_built_in_the_reading_of_its_cell():
    found = {}
    for entry in ALL["table1"]:
        name, reading = entry.cell.method["name"], entry.cell.method["reading"]
        if name != "retrain":  # whose network is trained elsewhere
            found[name, reading] = method_of(entry.cell)
    assert (found["fisher-noise", "released"].kind, found["fisher-noise", "golatkar"].kind) == ("batch", "expected")
    assert found["fisher-noise", "golatkar"].reading == "released" and found["fisher-noise", "text"].reading == "text"
    assert found["tf-idf-mask", "released"].reading == "released" and found["salun", "released"].passes == "apart"
    with pytest.raises(InputError, match="^method: finetune has no reading; found golatkar"):
        method_of(replace(ALL["table1"][0].cell, method={"name": "finetune", "reading": "golatkar"}))


def test_a_cell_that_does_not_say_rounds_to_the_nearest():
    """So were the masks of the results in the repository, in both readings."""
    for name in ("fisher-mask", "random-mask", "activation-mask"):
        cells = [entry.cell for entry in ALL["table1"] if entry.cell.method["name"] == name]
        assert {cell.method["reading"] for cell in cells} == {"text", "released"}
        assert {method_of(cell).rounding for cell in cells} == {"nearest"}
        assert method_of(replace(cells[-1], method={**cells[-1].method, "rounding": "down"})).rounding == "down"


def test_a_corrected_rule_gives_another_cell():
    """A result of the rule before must not be taken for one of the rule now."""
    for (name, reading), revision in REVISIONS.items():
        cells = [entry.cell for entry in ALL["table1"] if (entry.cell.method["name"], entry.cell.method["reading"]) == (name, reading)]
        assert cells and all(cell.method["revision"] == revision for cell in cells)
        before = {key: value for key, value in cells[0].method.items() if key != "revision"}
        assert replace(cells[0], method=before).digest != cells[0].digest


@pytest.mark.skipif(not RESULTS.is_dir(), reason="needs the results in the repository")
def test_every_result_in_the_repository_is_of_a_cell_that_is_asked_for():
    asked = {entry.cell.digest for members in ALL.values() for entry in members}
    others = profile_of("paper", models=("mnist/resnet20", "mnist/vgg16", "tiny-imagenet/resnet20", "cifar10/vgg16"))
    asked |= {entry.cell.digest for entry in entries(EXPERIMENTS["table1"], others)}
    forgetting = profile_of("paper", models=("cifar10/resnet20", "cifar10/vgg16", "mnist/resnet20"))
    asked |= {entry.cell.digest for entry in entries(EXPERIMENTS["forget"], forgetting)}
    stale = [path.name for path in sorted(RESULTS.glob("*.json")) if path.stem not in asked]
    assert not stale


def test_a_recipe_without_a_rate_for_fine_tuning_does_not_mention_it():
    assert all("tuning_rate" not in entry.cell.recipe for members in ALL.values() for entry in members)
    tiny = entries(EXPERIMENTS["table1"], profile_of("paper", models=("tiny-imagenet/resnet20",)))[0].cell
    assert tiny.recipe["tuning_rate"] == 0.005 and "tuning_rate" not in original(tiny).recipe


def test_ssd_is_held_against_the_remain_data():
    """Its own threshold of 10 is above what F_f/F can be where a tenth is forgotten."""
    found = {name: {entry.cell.method["threshold"] for entry in ALL[name] if "threshold" in entry.cell.method} for name in ALL}
    assert {entry.cell.method["name"] for entry in ALL["table1"] if "threshold" in entry.cell.method} == {"ssd", "lfssd"}
    assert found["table1"] == {5.26, 9.17}  # 10 and 100 classes
    assert found["table3"] == {10.0} and found["table4"] == {5.26, 2.7, 1.82}


def test_the_papers_methods_alone():
    named = {entry.cell.method["name"] for entry in entries(EXPERIMENTS["table1"], SMOKE, listed=("paper",))}
    assert named == {*PAPER_METHODS, "mask-classifier"}
    shown = {entry.cell.method["name"] for entry in entries(EXPERIMENTS["fig-influence"], SMOKE, listed=("paper",))}
    assert shown == {"finetune", "influence", "fisher-mask"}


def test_only_takes_the_cells_with_all_words():
    found = entries(EXPERIMENTS["table1"], SMOKE, only=("seed=666", "fisher-mask-released"))
    assert [(entry.cell.seed, entry.cell.method["reading"]) for entry in found] == [(666, "released")]


def test_profiles_can_be_changed():
    profile = profile_of("paper", seeds=(1, 2), models=("cifar10/vgg16",))
    assert profile.seeds == (1, 2) and {entry.cell.network for entry in entries(EXPERIMENTS["table1"], profile)} == {"vgg16"}


def test_a_model_may_be_one_of_a_folder_of_pictures(tmp_path):
    folder = tmp_path / "some" / "pictures"
    folder.mkdir(parents=True)
    profile = profile_of("smoke", models=(f"{folder}/resnet8", f"{tmp_path}/some//./pictures/resnet8"))
    assert profile.models == (f"{folder}/resnet8",) * 2
    for experiment in EXPERIMENTS.values():
        cells = [entry.cell for entry in entries(experiment, profile)]
        assert cells and {(cell.dataset, cell.network) for cell in cells} == {(str(folder), "resnet8")}
    spec = named("pictures-resnet8-seed666.safetensors", [entry.cell for entry in entries(EXPERIMENTS["table1"], profile)])
    assert (spec.dataset, spec.network, spec.seed) == (str(folder), "resnet8", 666)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chosen(("table9",)), "experiments: must be all, or some of table1"),
        (lambda: profile_of("large"), "profile: must be one of smoke, paper; found large"),
        (lambda: profile_of("paper", models=("vgg16",)), "models: must be DATASET/NETWORK"),
        (
            lambda: profile_of("paper", models=("no/such/folder/vgg16",)),
            "models: the dataset must be one of digits, .* or a folder of pictures",
        ),
        (lambda: profile_of("paper", models=("digits/",)), "models: the network must be one of"),
        (lambda: entries(EXPERIMENTS["table1"], SMOKE, listed=("magic",)), "methods: must be all, paper, or some of"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
