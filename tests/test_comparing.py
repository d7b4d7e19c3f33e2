"""Several methods on one's own model: one table, one folder, and a reason where a method cannot work."""

import json
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import expunge
from expunge import SSD, BadTeacher, Finetune, FisherMask, InputError, Objective, Outcome, compare, load_outcome, metrics, unlearn
from expunge.comparing import Comparison
from expunge.storage.tensors import weights_digest
from tests.methods import cases, properties

MASK = FisherMask(0.1, tuning=None)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    methods = {"mask": MASK, "more": FisherMask(0.3, tuning=None), "tuned": expunge.Finetune(cases.QUICK), "row": expunge.MaskClassifier(7)}
    return compare(cases.model(), cases.forget(), cases.remain(), methods, retrained=cases.model())


def test_each_method_does_what_it_does_alone(comparison):
    alone = unlearn(cases.model(), cases.forget(), cases.remain(), MASK)
    assert weights_digest(comparison["mask"].model) == weights_digest(alone.model)
    assert comparison["mask"].history[-1].accuracies == alone.history[-1].accuracies
    assert list(comparison) == ["mask", "more", "tuned", "row"] and len(comparison) == 4
    before = {name: metrics.accuracy(cases.model(), data) for name, data in (("remain", cases.remain()), ("forget", cases.forget()))}
    assert comparison.before == before == comparison.retrained


def test_the_model_is_as_it_was():
    model = cases.model()
    with properties.assert_untouched(model):
        compare(model, cases.forget(), cases.remain(), [MASK, "ssd"], retrained=model)


def test_a_method_that_cannot_work_is_a_row_with_its_reason(comparison):
    lines = str(comparison).splitlines()
    row = next(line for line in lines if line.startswith("row"))
    assert row.split() == ["row", "–", "–", "–", "–"]
    assert lines[-1].startswith("– row: ") and "7" in lines[-1]
    with pytest.raises(InputError, match="^label: row has no outcome: "):
        comparison["row"]
    with pytest.raises(InputError, match="^label: must be one of mask, more, tuned, row; found 'other'"):
        comparison["other"]
    error = comparison.results["row"]
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)  # which would hold a copy of the model
    assert repr(comparison) == "Comparison(mask, more, tuned, row failed)"


def test_the_table_has_a_row_for_every_network(comparison):
    lines = str(comparison).splitlines()
    assert lines[1].split() == ["remain", "forget", "score", "seconds"]
    assert [line.split()[0] for line in lines[2:8]] == ["before", "mask", "more", "tuned", "row", "retrained"]
    accuracies = comparison["tuned"].history[-1].accuracies
    score = metrics.unlearn_score(accuracies["remain"], accuracies["forget"])
    assert re.split(r"\s\s+", lines[5])[:4] == [
        "tuned",
        f"{100 * accuracies['remain']:.1f} %",
        f"{100 * accuracies['forget']:.1f} %",
        f"{score:.3f}",
    ]
    html = comparison._repr_html_()
    assert html.startswith("<table><caption>4 methods compared") and html.count("<tr>") == 7 and "row: " in html


def test_the_table_fits_80_columns():
    names = ["validation remain", "validation forget", "x" * 60, "<b>\n", "test"]
    outcome = Outcome(nn.Linear(2, 1), None, [expunge.Record(3, dict.fromkeys(names, 1.0), None, 0.1)], 123456.7, MASK)
    results = {"a label that is much longer than a table has room for": outcome, "no": InputError("remain", "must " * 60, "none")}
    shown = Comparison(results, dict.fromkeys(names, 0.5), dict.fromkeys(names, 1.0))
    lines = str(shown).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["validation", "remain", "validation", "forget", "seconds"] and "and 3 more watched" in lines
    assert "<b>" not in shown._repr_html_() and shown._repr_html_().count("<td>") == 5 * 6


def test_labels_tell_settings_that_differ():
    found = compare(cases.model(), cases.forget(), cases.remain(), [MASK, FisherMask(0.2, tuning=None), "ssd", SSD(3.0)], watch={})
    assert list(found) == ["FisherMask(ratio=0.1)", "FisherMask(ratio=0.2)", "SSD(threshold=10.0)", "SSD(threshold=3.0)"]
    assert found.before == {} and "FisherMask(ratio=0.1)" in str(found)


@pytest.mark.filterwarnings("ignore:SSD. nothing was dampened")
def test_the_default_methods_keep_what_is_not_to_be_forgotten():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    expunge.train(model, cases.dataset(), expunge.Tuning(expunge.Constant(0.1, 20), batch_size=16))
    found = compare(model, cases.forget(), cases.remain())
    assert list(found) == ["Choose", "FisherMask", "FisherMask, as released", "SSD", "RandomLabels", "BadTeacher", "SCRUB"]
    assert found.before["remain"] > 0.9
    for label in found:
        assert found[label].history[-1].accuracies["remain"] > found.before["remain"] - 0.1, label


def test_a_warning_names_the_method_and_the_callers_line():
    with pytest.warns(expunge.NoEffectWarning) as caught:
        compare(cases.model(), cases.forget(), cases.remain(), {"mask": MASK, "none of it": FisherMask(0, tuning=None)})
    assert [(str(warning.message).split(":")[0], warning.filename) for warning in caught] == [("none of it", __file__)]
    with pytest.warns(expunge.NoEffectWarning, match="^the mask") as caught:
        unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(0, tuning=None))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning")
def test_validation_is_for_those_that_choose():
    held = Subset(cases.dataset(), [1, 2, 4, 5])
    remain = Subset(cases.dataset(), [row for row in range(6, 48) if row % 3])
    methods = {"chosen": expunge.Choose(epochs=1, max_drop=1.0), "mask": MASK}
    found = compare(cases.model(), cases.forget(), remain, methods, validation=iter(DataLoader(held, 2)))
    assert isinstance(found["mask"], Outcome) and found["mask"].choice is None
    assert any("`validation` samples" in reason for reason in found["chosen"].choice.reasons)


@pytest.mark.filterwarnings("ignore:SSD. nothing was dampened")
def test_iterators_are_read_for_every_method():
    batches = [{"watched": iter(DataLoader(cases.remain(), 16))}, iter(DataLoader(cases.forget(), 8)), iter(DataLoader(cases.remain(), 8))]
    found = compare(cases.model(), batches[1], batches[2], ["ssd", MASK], watch=batches[0])
    assert all(found[label].history[-1].accuracies.keys() == {"watched"} for label in found)


def test_an_objective_without_classes_is_compared_without_accuracies():
    own = Objective(losses=lambda logits, targets: (logits[:, 0] - targets).square(), classes=False)
    found = compare(cases.model(), cases.forget(), cases.remain(), [MASK, BadTeacher()], objective=own)
    assert isinstance(found.results["FisherMask"], Outcome) and "BadTeacher needs class logits" in str(found.results["BadTeacher"])
    unsaid = Objective(losses=own.losses)
    with pytest.raises(InputError, match=r"^remain: accuracy needs class logits; .*watch=\{\} measures no accuracy"):
        compare(cases.model(), cases.forget(), cases.remain(), [MASK], objective=unsaid)


def test_what_all_methods_refuse_is_raised():
    with pytest.raises(InputError, match="^remain: must not hold samples of the forget set"):
        compare(cases.model(), cases.forget(), cases.dataset(), [MASK, "ssd"])
    with pytest.raises(InputError, match="^head: "):
        compare(cases.model(), cases.forget(), cases.remain(), [MASK, "ssd"], head="nothing")
    found = compare(cases.model(), cases.forget(), None, ["ssd", "scrub"])  # each for a reason of its own
    assert "SSD needs the data to keep" in str(found) and "SCRUB needs the data to keep" in str(found)


BAD = {
    "none": ([], "methods: must be methods such as .*; found none"),
    "a name alone": ("ssd", "methods: must be .*one or more in a list; found 'ssd'"),
    "one alone": (MASK, "methods: must be .*one or more in a list; found FisherMask"),
    "a class": ([FisherMask], "methods: must be .*; found <class"),
    "an unknown name": (["nope"], "methods: must be one of fisher-mask, .*; found nope"),
    "a number in a mapping": ({"a": 3}, "methods: must be .*; found 3"),
    "the same twice": ([MASK, MASK], "methods: must have different labels; give a mapping of labels to methods; found FisherMask twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_methods_that_are_none_are_named(name):
    methods, message = BAD[name]
    with pytest.raises(InputError, match=f"^{message}"):
        compare(cases.model(), cases.forget(), cases.remain(), methods)


def test_bad_options_are_named():
    data = cases.model(), cases.forget(), cases.remain(), [MASK]
    for options, message in (
        ({"watch": [1]}, "^watch: must map names to data"),
        ({"watch": {"test": 3}}, "^watch.'test'.: must be a dataset, a data loader or an iterable of batches"),
        ({"batch_size": 0}, "^batch_size: "),
        ({"objective": 3}, "^objective: must be an Objective"),
        ({"progress": 3}, "^progress: must be True or False"),
        ({"retrained": nn.Linear}, "^retrained: must be a torch.nn.Module, built"),
        ({"retrained": nn.Linear(3, 3)}, "^retrained: must be a network like the model; remain: must be what the model .Linear. takes"),
    ):
        with pytest.raises(InputError, match=message):
            compare(*data, **options)
    with pytest.raises(InputError, match="^model: must be a torch.nn.Module"):
        compare(None, *data[1:])


def test_the_method_at_work_is_shown(capsys):
    compare(cases.model(), cases.forget(), cases.remain(), [MASK, "ssd"], progress=True)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "FisherMask (1 of 2)" and "SSD (2 of 2)" in shown
    compare(cases.model(), cases.forget(), cases.remain(), [MASK], progress=False)
    assert capsys.readouterr().err == ""


def test_a_comparison_is_saved_whole_and_replaced(comparison, tmp_path):
    folder = comparison.save(tmp_path / "runs" / "comparison")
    written = json.loads((folder / "result.json").read_text())
    assert [(row["label"], row["folder"]) for row in written["methods"]] == [
        ("mask", "1-mask"),
        ("more", "2-more"),
        ("tuned", "3-tuned"),
        ("row", None),
    ]
    assert written["before"] == comparison.before == written["retrained"] and written["methods"][-1]["error"].startswith("label")
    loaded = load_outcome(folder / "2-more", cases.model())
    assert weights_digest(loaded.model) == weights_digest(comparison["more"].model) and str(loaded) == str(comparison["more"])
    Comparison({"ssd!": comparison["mask"], "SSD": comparison["more"]}, {}).save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["1-ssd", "2-SSD", "result.json"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["comparison"]


@pytest.mark.parametrize("place", ["mine.txt", "1-mask/mine.txt"])
def test_what_is_not_of_the_comparison_is_never_removed(comparison, tmp_path, place):
    comparison.save(tmp_path / "comparison")
    (tmp_path / "comparison" / place).write_text("mine")
    with pytest.raises(InputError, match=f"^folder: must be a folder that is new, empty, or holds an earlier result .*found .*{place}"):
        comparison.save(tmp_path / "comparison")
    assert (tmp_path / "comparison" / place).read_text() == "mine"


def test_a_failure_while_saving_leaves_the_earlier_comparison(comparison, tmp_path, monkeypatch):
    comparison.save(tmp_path / "comparison")
    before = {path: path.read_bytes() for path in (tmp_path / "comparison").rglob("*") if path.is_file()}
    other = Comparison({"a": comparison["mask"], "b": Outcome(nn.Linear(2, 1), None, [], 0.0, MASK)}, {})
    monkeypatch.setattr("expunge.outcome.save_weights", lambda path, model: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        other.save(tmp_path / "comparison")
    assert {path: path.read_bytes() for path in (tmp_path / "comparison").rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["comparison"]


def test_torch_is_as_it_was():
    state = torch.get_rng_state()
    compare(cases.model(), cases.forget(), cases.remain(), [MASK])
    assert torch.equal(state, torch.get_rng_state())


def test_a_defect_of_one_method_does_not_cost_the_others():
    @dataclass(frozen=True)
    class Defect:
        def __call__(self, model, forget, remain, run):
            raise ValueError("a defect")

    comparison = compare(cases.model(), cases.forget(), cases.remain(), {"defect": Defect(), "fine": Finetune(cases.QUICK)}, progress=False)
    assert comparison["fine"].model is not None and "defect: ValueError: a defect" in str(comparison)
