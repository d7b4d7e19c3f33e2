"""An outcome is shown in a few lines, saved whole, and loaded as it was."""

import json
import re

import pytest
import torch
from torch import nn

from expunge import Finetune, FisherMask, InputError, MismatchError, Outcome, Patch, Record, fisher, load_outcome, unlearn
from expunge.storage.tensors import weights_digest
from tests.methods import cases, properties
from tests.methods.cases import QUICK


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(0.1, tuning=QUICK))


def test_print_shows_a_short_table(outcome):
    lines = str(outcome).splitlines()
    title = re.fullmatch(r"FisherMask: 2 epochs, \d+\.\d\d s, (\d+) of 595 weights changed", lines[0])
    before = cases.model()
    changed = sum(int((value != before.get_parameter(name)).sum()) for name, value in outcome.model.named_parameters())
    assert title and int(title[1]) == changed
    start, edited, last = (100 * outcome.history[index].accuracies["forget"] for index in (0, 1, -1))
    assert lines[1].split() == ["accuracy", "before", "epoch", "0", "epoch", "2"]
    assert lines[3].split() == ["forget", f"{start:.1f}", "%", f"{edited:.1f}", "%", f"{last:.1f}", "%"]
    assert len(lines) == 4 and all(len(line) <= 80 for line in lines)
    assert repr(outcome).startswith(f"Outcome({lines[0]}, remain ") and "\n" not in repr(outcome) and len(repr(outcome)) < 200


def test_a_notebook_shows_a_table(outcome):
    html = outcome._repr_html_()
    assert html.startswith("<table><caption>FisherMask: 2 epochs") and html.count("<tr>") == 3
    assert "tensor(" not in html + str(outcome) + repr(outcome)


def test_what_was_not_watched_or_recorded_is_not_shown():
    model = nn.Linear(2, 1)
    assert str(Outcome(model, None, [], 0.5, Finetune())) == "Finetune: 0 epochs, 0.50 s, other parameters than before"
    empty = Patch({}, "0" * 64)
    one = Outcome(model, empty, [Record(1, {}, None, 0.1)], 1234.5, "FisherMask(ratio=0.1)")
    assert str(one) == "FisherMask: 1 epoch, 1,234 s, 0 of 3 weights changed"
    assert repr(one) == f"Outcome({one}, nothing watched)"


def test_names_are_shown_and_not_obeyed():
    watched = {"<script>\n": 0.5} | {f"{number} {'x' * 100}": 0.25 for number in range(20)}
    outcome = Outcome(nn.Linear(2, 1), None, [Record(0, watched, None, 0.1)], 1.0, Finetune())
    assert "<script>" not in outcome._repr_html_() and "&lt;script&gt;" in outcome._repr_html_()
    lines = str(outcome).splitlines()
    assert lines[-1] == "and 13 more" and all(len(line) <= 80 for line in lines)


def test_patches_and_sums_tell_names_and_counts(outcome):
    edited = len(outcome.edit.edits)
    assert repr(outcome.edit) == f"Patch({len(outcome.edit)} entries of {edited} tensors, made for {outcome.edit.digest[:12]})"
    assert str(outcome.edit).startswith(repr(outcome.edit)) and "5.weight" in str(outcome.edit)
    sums = fisher.diagonal(cases.model(), cases.forget())
    assert repr(sums) == f"FisherSums(empirical, 16 samples, 7 parameters, 591 entries, at {sums.digest[:12]})"
    assert re.search(r"^5.weight +512$", str(sums), re.MULTILINE)
    for shown in (sums, outcome.edit):
        assert shown._repr_html_().startswith("<table>") and "tensor(" not in shown._repr_html_() + repr(shown)
    batch = fisher.diagonal(cases.model(), cases.forget(), kind="batch", parameters=["7.bias"])
    assert repr(batch).startswith("FisherSums(batch, 1 batch, 1 parameter, 3 entries, at ")


def test_many_tensors_are_not_all_listed():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    lines = str(Patch.zeroing(model, {name: torch.ones_like(value, dtype=torch.bool) for name, value in model.named_parameters()}))
    assert len(lines.splitlines()) == 11 and lines.endswith("and 12 more")


def assert_same_outcome(found: Outcome, expected: Outcome) -> None:
    assert weights_digest(found.model) == weights_digest(expected.model)
    assert (found.history, found.seconds, str(found)) == (expected.history, expected.seconds, str(expected))
    for one, other in ((found.patch, expected.patch), (found.edit, expected.edit)):
        assert (one is None) == (other is None) and repr(one) == repr(other)


def test_an_outcome_is_saved_and_loaded(outcome, tmp_path):
    folder, model = outcome.save(tmp_path / "outcome"), cases.model()
    assert sorted(path.name for path in folder.iterdir()) == [
        "edit.safetensors",
        "patch.safetensors",
        "result.json",
        "weights.safetensors",
    ]
    with properties.assert_untouched(model):
        loaded = load_outcome(folder, model)
    assert_same_outcome(loaded, outcome)
    assert loaded.method == repr(outcome.method)
    assert_same_outcome(load_outcome(loaded.save(tmp_path / "again"), model), outcome)
    loaded.patch.revert(loaded.model)
    assert weights_digest(loaded.model) == weights_digest(model)


def test_a_folder_that_was_saved_before_histories_began_with_the_model_before_still_loads(outcome, tmp_path):
    folder = outcome.save(tmp_path / "outcome")
    content = json.loads((folder / "result.json").read_text())
    assert [record["epoch"] for record in content["history"]] == [None, 0, 1, 2]
    (folder / "result.json").write_text(json.dumps(content | {"history": content["history"][1:]}))
    loaded = load_outcome(folder, cases.model())
    assert loaded.history == loaded.epochs == outcome.epochs
    assert str(loaded).splitlines()[1].split() == ["accuracy", "epoch", "0", "epoch", "2"]


def test_an_earlier_outcome_is_replaced_and_a_strangers_file_is_not(outcome, tmp_path):
    outcome.save(tmp_path / "outcome")
    trained = unlearn(cases.model(), cases.forget(), cases.remain(), Finetune(QUICK), watch={})
    folder = trained.save(tmp_path / "outcome")
    assert_same_outcome(load_outcome(folder, cases.model()), trained)
    assert not (folder / "edit.safetensors").exists()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(
        InputError, match="^folder: must be a folder that is new, empty, or holds an earlier result of the same kind [(]unlearn[)]"
    ):
        trained.save(folder)


def test_shared_weights_and_caches_are_saved(tmp_path):
    def network(cache: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model.register_buffer("cache", torch.ones(cache), persistent=False)
        return model

    saved = network(2)
    folder = Outcome(saved, Patch({}, weights_digest(saved)), [], 0.0, Finetune()).save(tmp_path / "outcome")
    assert weights_digest(load_outcome(folder, network(2)).model) == weights_digest(saved)
    loaded = load_outcome(folder, network(5)).model
    assert len(loaded.cache) == 5 and torch.equal(loaded[1].weight, saved[0].weight) and loaded[1].weight is loaded[0].weight


OTHERS = {
    "names": (lambda: nn.Sequential(cases.model()), "only one of them has 0.0.bias"),
    "type": (lambda: cases.model(torch.float64), "the model has it of .*float64"),
    "one more": (lambda: cases.model().append(nn.Linear(3, 3)), "only one of them has 8.bias, 8.weight"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_form_is_refused(outcome, tmp_path, name):
    other, rule = OTHERS[name]
    outcome.save(tmp_path / "outcome")
    with pytest.raises(MismatchError, match=rule):
        load_outcome(tmp_path / "outcome", other())


BROKEN = {
    "another command": {"command": "demo"},
    "an accuracy of 2": {"history": [{"epoch": 0, "accuracies": {"remain": 2}, "unlearn_score": None, "seconds": 0}]},
    "accuracies that are none": {"history": [{"epoch": None, "accuracies": None, "unlearn_score": None, "seconds": 0}]},
    "no epoch": {"history": [{"accuracies": {}, "unlearn_score": None, "seconds": 0}]},
    "an epoch of 1.5": {"history": [{"epoch": 1.5, "accuracies": {}, "unlearn_score": None, "seconds": 0}]},
    "a history of text": {"history": "none"},
    "accuracies of other data": {"history": [{"epoch": 0, "accuracies": {"test": 1}, "unlearn_score": None, "seconds": 0}]},
    "a list of accuracies": {"history": [{"epoch": 0, "accuracies": [], "unlearn_score": None, "seconds": 0}]},
    "seconds below 0": {"seconds": -1},
    "true seconds": {"seconds": True},
    "a method of numbers": {"method": 3},
    "files that are none": {"files": 3},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_result_that_was_changed_is_refused(outcome, tmp_path, name):
    folder = outcome.save(tmp_path / "outcome")
    content = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(content | BROKEN[name]))
    with pytest.raises(InputError, match="^folder: must hold the result.json of an outcome that was saved"):
        load_outcome(folder, cases.model())


def test_files_of_another_outcome_are_refused(outcome, tmp_path):
    folder = outcome.save(tmp_path / "outcome")
    trained = unlearn(cases.model(), cases.forget(), cases.remain(), Finetune(QUICK), watch={})
    (trained.save(tmp_path / "other") / "weights.safetensors").replace(folder / "weights.safetensors")
    with pytest.raises(MismatchError, match="does not hold the weights that its result.json tells of"):
        load_outcome(folder, cases.model())


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="^folder: must hold the result.json of an outcome that was saved .*; found .*nowhere"):
        load_outcome(tmp_path / "nowhere", cases.model())
