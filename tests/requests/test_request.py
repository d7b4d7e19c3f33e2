"""A request from end to end: what the folder holds, requests that add up, and bad input that changes nothing."""

import copy
import json
import os
import re
import shutil
import stat
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.errors import InputError, MismatchError
from expunge.methods import FisherMask
from expunge.requests import request as carrying
from expunge.requests.estimate import estimate
from expunge.requests.ledger import read_ledger
from expunge.requests.prepared import prepare
from expunge.requests.request import fulfil
from expunge.requests.settings import Settings, build_method
from expunge.requests.verifying import verify
from expunge.storage.folders import reserved
from expunge.training import Constant, Tuning
from tests.disks import small_disk
from tests.requests.small import MASK, TASK, request, write_task


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_folder_holds_all_that_is_promised(tmp_path):
    lines = []
    receipt = fulfil(request(tmp_path), lines.append)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "weights.safetensors",
        "patch.safetensors",
        "edit.safetensors",
        "settings.json",
        "openings.json",
        "log.txt",
        "receipt.json",
        "ledger.jsonl",
        "result.json",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"mytask.py", "model.safetensors", "out"}
    assert all(finding.fits for finding in verify(tmp_path / "out" / "receipt.json"))
    assert (receipt.number, receipt.forget, receipt.forgotten, receipt.samples) == (1, 10, 10, 120)
    assert lines[0] == "forget 10 of 120 samples, by fisher-mask, on cpu" and all(
        line in (tmp_path / "out" / "log.txt").read_text() for line in lines
    )
    after, before = load_file(tmp_path / "out" / "weights.safetensors"), load_file(tmp_path / "model.safetensors")
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    assert after.keys() == before.keys() and changed == round(0.1 * 144)  # of those outside the head
    assert stat.S_IMODE(os.stat(tmp_path / "out" / "openings.json").st_mode) == 0o600


def test_ids_are_in_one_private_file_alone(tmp_path):
    write_task(tmp_path, TASK.replace("points(120, 1)", "points(20_000, 1)"))
    fulfil(request(tmp_path, "19871,19872,19999"))
    for name, content in contents(tmp_path / "out").items():
        assert bool(re.search(rb"\b19871\b|\b19999\b", content)) == (name.name == "openings.json"), name


ALL = sorted({*range(5), *range(2, 120, 4), 7, 9, 33})


@pytest.mark.parametrize("order", [("0-4", "label=2", "7,9,33"), ("7,9,33", "0-4", "label=2"), ("label=2", "0-4,7,9,33")])
def test_requests_in_any_order_end_in_the_weights_of_one_for_all(order, tmp_path):
    receipts = [fulfil(request(tmp_path, forget, "several")) for forget in order]
    together = fulfil(request(tmp_path, ",".join(map(str, ALL)), "one"))
    assert receipts[-1].forgotten == together.forgotten == len(ALL)
    assert receipts[-1].weights_after == together.weights_after != together.weights_before
    assert (tmp_path / "several" / "weights.safetensors").read_bytes() == (tmp_path / "one" / "weights.safetensors").read_bytes()


def test_each_request_has_its_line_and_its_receipt(tmp_path):
    first = fulfil(request(tmp_path, "0-4"))
    second = fulfil(request(tmp_path, "3-9"))
    ledger = read_ledger((tmp_path / "out" / "ledger.jsonl").read_bytes())
    assert [entry.samples for entry in ledger] == [5, 5] and [first.entry(), second.entry()] == [*ledger]
    assert (tmp_path / "out" / "receipt-1.json").read_bytes() == first.content() and second.forgotten == 10


def test_the_same_request_again_does_nothing(tmp_path):
    first, lines = fulfil(request(tmp_path)), []
    before = contents(tmp_path)
    assert fulfil(request(tmp_path), lines.append) == first and contents(tmp_path) == before
    assert lines == ["all 10 samples were forgotten before; nothing to do"]


def test_without_a_method_one_is_chosen(tmp_path):
    lines = []
    receipt = fulfil(request(tmp_path, "label=1", settings=Settings(given=("epochs=12",), threads=1)), lines.append)
    assert receipt.method.startswith("ResetAndDistil(") and "goal_met" in receipt.measured
    assert any(line.startswith("chose ") for line in lines)
    settings = json.loads((tmp_path / "out" / "settings.json").read_bytes())
    assert settings["method"] == "choose" and settings["choice"]["method"] == receipt.method


@pytest.mark.parametrize("changed", [True, False])
def test_a_network_that_was_left_as_it_was_has_not_met_the_goal(changed, tmp_path, monkeypatch):
    """Whatever was measured: it may have been so before."""

    def unlearn(model, *data, **others):
        outcome = plain(model, *data, **others)
        if changed:
            same = outcome.model
        else:
            same, outcome = copy.deepcopy(model), replace(outcome, patch=replace(outcome.patch, edits={}))
        return replace(outcome, model=same, choice=replace(outcome.choice, goal_met=True, missing=()))

    plain, lines = carrying.unlearn, []
    monkeypatch.setattr(carrying, "unlearn", unlearn)
    receipt = fulfil(request(tmp_path, "label=1", settings=Settings(given=("epochs=12",), threads=1)), lines.append)
    assert receipt.measured["goal_met"] is changed
    assert ("goal met" in lines) is changed and ("GOAL NOT MET: no weight was changed" in lines) is not changed


def test_a_later_request_has_the_method_of_the_folder(tmp_path):
    """Without one: an edit by another would replace that of the samples before."""
    fulfil(request(tmp_path, "0-4"))
    lines = []
    second = fulfil(request(tmp_path, "7,9", settings=Settings(threads=1)), lines.append)
    assert lines[0] == "forget 7 of 120 samples, 2 of them new, by fisher-mask, on cpu"
    assert second.weights_after == fulfil(request(tmp_path, "0-4,7,9", "one")).weights_after


@pytest.mark.parametrize(
    "settings, told",
    [
        (
            Settings("random-mask", ("tuning=None",)),
            "by random-mask tuning=None, and no longer by fisher-mask ratio=0.1 tuning=None: that edit",
        ),
        (
            Settings(given=("ratio=0.2", "tuning=None")),
            "by fisher-mask ratio=0.2 tuning=None, and no longer by fisher-mask ratio=0.1 tuning=",
        ),
    ],
)
def test_another_method_in_the_same_folder_is_told(settings, told, tmp_path):
    """It replaces the edit of the samples before, and is refused where there are no others."""
    fulfil(request(tmp_path, "0-4"))
    before = contents(tmp_path)
    with pytest.raises(InputError, match="method: must be that of .*, fisher-mask ratio=0.1 tuning=None, where all these samples are"):
        fulfil(request(tmp_path, "0-3", settings=settings))
    assert contents(tmp_path) == before
    assert any(line.startswith(told) for line in estimate(prepare(request(tmp_path, "7", settings=settings))))
    lines = []
    fulfil(request(tmp_path, "7", settings=settings), lines.append)
    assert lines[0].startswith(told) and lines[0] in (tmp_path / "out" / "log.txt").read_text()


def test_another_recipe_is_told_too(tmp_path):
    tuned = Settings("finetune", threads=1)
    fulfil(request(tmp_path, "0-4", settings=tuned))
    lines = []
    write_task(tmp_path, TASK.replace("Constant(0.05, epochs=2)", "Constant(0.02, epochs=2)"))
    fulfil(request(tmp_path, "0-4", settings=tuned), lines.append)
    fulfil(request(tmp_path, "7", settings=tuned), lines.append)
    assert lines[0] == "all 5 samples were forgotten before; nothing to do"
    assert lines[1].startswith("by Finetune(") and "0.02" in lines[1] and "0.05" in lines[1]


def test_where_functions_are_in_memory_does_not_count():
    from expunge.requests.settings import described, is_described

    first, second = (
        build_method(Settings("finetune"), Tuning(Constant(0.3, epochs=20), optimizer=lambda parameters: torch.optim.Adam(parameters)))
        for _ in range(2)
    )
    assert first != second and is_described(first, described(second))
    assert not is_described(build_method(Settings("finetune"), None), described(first))


def test_what_examines_a_request_adds_files_and_measures(tmp_path):
    def examine(made, folder):
        (folder / "audit.json").write_text("{}")
        return {"audit": {"verdict": "none", "changed": len(made.outcome.patch)}}

    receipt = fulfil(request(tmp_path), examine=examine)
    assert receipt.measured["audit"]["changed"] == 14 and "audit.json" in receipt.files
    assert all(finding.fits for finding in verify(tmp_path / "out" / "receipt.json"))
    fulfil(request(tmp_path, "50"), examine=examine)


def test_a_dry_run_tells_and_writes_nothing(tmp_path):
    asked = request(tmp_path)
    before = contents(tmp_path)
    lines = list(estimate(prepare(asked)))
    assert contents(tmp_path) == before and not (tmp_path / "out").exists()
    assert lines[1] == "forget: 10 of 120 samples (10 by this request), remain: 110" and any("disk: " in line for line in lines)


def test_an_estimate_counts_the_reading_of_samples_and_the_epochs_of_small_data(tmp_path):
    slow = """
import time

class Slow(torch.utils.data.Dataset):
    def __getitem__(self, row):
        time.sleep(0.002)
        return points(120, 1)[row]

    def __len__(self):
        return 120

def train():
    return Slow()
"""
    request(tmp_path)
    write_task(tmp_path, TASK + slow)
    lines = list(estimate(prepare(request(tmp_path, settings=Settings()))))
    (taken,) = (float(line.split()[-3]) for line in lines if line.startswith("a training pass"))
    assert taken >= 0.2  # 110 samples
    # 7 batches of 16: 60 steps per epoch of the trials
    assert any(line.endswith("86 to 515 as a rule") for line in lines)


@pytest.mark.parametrize(
    "function, told",
    [
        (
            "train(): return points(120, 1)[:][0].double(), torch.zeros(120).long()",
            r"train\(\): must be what the model .* with \.float\(\)",
        ),
        ("train(): return torch.zeros(120, 6), torch.full((120,), 4)", r"train\(\): labels must be in \[0, 4\), .* found 4"),
        ("train(): return torch.zeros(120, 6), torch.full((120, 4), 0.25)", r"train\(\): accuracy needs one integer label for each row"),
        (
            "train(): return [{'x': [1] * (3 + row % 2), 'label': 0} for row in range(120)]",
            r"train\(\): samples must be .* with a collate_fn",
        ),
        ("test(): return points(40, 2)[:][0][:, :5], torch.zeros(40).long()", r"test\(\): must be what the model \(Sequential\) takes"),
        ("test(): return torch.zeros(9, 6), torch.full((9,), 4)", r"test\(\): labels must be in \[0, 4\), .* found 4"),
        ("validation(): return torch.zeros(9, 6), torch.full((9,), 4)", r"validation\(\): labels must be in \[0, 4\)"),
        ("validation(): 1 / 0", r"task: validation\(\) of .*mytask.py must not raise"),
    ],
)
def test_a_dry_run_reads_all_data_of_the_task(function, told, tmp_path):
    request(tmp_path)
    write_task(tmp_path, f"{TASK}\ndef {function}\n")
    with pytest.raises(InputError, match=told):
        carrying.checked(request(tmp_path, settings=Settings()))


SETTINGS = ", ".join(sorted(field.name for field in fields(FisherMask)))


@pytest.mark.parametrize(
    "change, told",
    [
        ({"forget": "120"}, "forget: ids must be rows"),
        ({"forget": "0-119"}, "forget: must leave samples to keep"),
        ({"settings": Settings("nonsense")}, "method: must be choose, one of fisher-mask"),
        ({"settings": Settings("fisher-mask", ("ratio=2",))}, "ratio: must be in"),
        ({"settings": Settings("fisher-mask", ("rate=2",))}, f"set: must be settings of fisher-mask; it has {SETTINGS}; found rate"),
        ({"settings": Settings("fisher-mask", ("ratio",))}, "set: must be NAME=VALUE"),
        ({"settings": Settings("fisher-mask", ("ratio=0.1", "ratio=0.2"))}, "set: must give every setting once"),
        ({"settings": Settings(device="cuda:99")}, "device: must be one that torch finds"),
        ({"settings": Settings(batch_size=0)}, "batch_size: must be a whole number"),
        ({"settings": Settings(threads=0)}, "threads: must be a whole number"),
        (
            {"settings": Settings(device=torch.device("cpu"))},
            "settings: must have fields of the types that Settings names; found device is",
        ),
        ({"settings": Settings("finetune", (1,))}, "settings: must have fields of the types that Settings names; found given is 1"),
        ({"settings": {"method": "finetune"}}, "settings: must be requests.Settings, such as "),
        ({"forget": [20, 21]}, "forget: must be a text: 0-99,200 or label=3 or "),
        ({"weights": "nowhere.safetensors"}, "weights: must be a file of weights"),
        ({"sign": "nowhere.pem"}, "sign: "),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(change, told, tmp_path):
    asked = request(tmp_path)
    fulfil(asked)
    before = contents(tmp_path)
    with pytest.raises(InputError) as caught:
        fulfil(replace(asked, **{"forget": "20-22"} | change))
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_settings_of_a_store_are_those_of_one_that_is_given(tmp_path):
    """They are noted by it; without one a replay would look for its sums."""
    fulfil(request(tmp_path, settings=Settings("finetune", threads=1, sums="class", sums_threads=1)))
    assert all(finding.fits for finding in verify(tmp_path / "out" / "receipt.json", task=tmp_path / "mytask.py"))


def test_samples_of_earlier_requests_and_all_others_are_refused(tmp_path):
    fulfil(request(tmp_path, "0-9"))
    before = contents(tmp_path)
    with pytest.raises(InputError, match="all there are"):
        fulfil(request(tmp_path, "10-119"))
    assert contents(tmp_path) == before


def test_samples_of_the_test_data_are_refused(tmp_path):
    write_task(tmp_path, TASK.replace("return points(40, 2)", "return torch.utils.data.Subset(points(120, 1), range(30))"))
    with pytest.raises(InputError, match="forget: must not name samples of the test data"):
        fulfil(request(tmp_path, "20-40"))
    assert not (tmp_path / "out").exists()


def test_other_weights_or_data_than_those_before_are_refused(tmp_path):
    fulfil(request(tmp_path))
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: value + 1 if value.is_floating_point() else value for name, value in state.items()}, tmp_path / "other.safetensors")
    before = contents(tmp_path)
    with pytest.raises(MismatchError, match="weights: must be the original ones"):
        fulfil(replace(request(tmp_path, "50"), weights=tmp_path / "other.safetensors"))
    with pytest.raises(MismatchError, match="weights: must be the original ones"):
        fulfil(replace(request(tmp_path, "50"), weights=tmp_path / "out" / "weights.safetensors"))
    assert contents(tmp_path) == before
    write_task(tmp_path, TASK.replace("points(120, 1)", "points(120, 9)"))
    with pytest.raises(MismatchError, match=r"task: train\(\) must return the data of the requests"):
        fulfil(request(tmp_path, "50"))


@pytest.mark.parametrize("name", ["weights.safetensors", "patch.safetensors", "ledger.jsonl", "receipt.json", "openings.json", "log.txt"])
def test_a_folder_that_was_tampered_with_is_refused(name, tmp_path):
    fulfil(request(tmp_path))
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="out: must be as `expunge unlearn` left it; found "):
        fulfil(request(tmp_path, "50"))
    assert contents(tmp_path) == before


def test_a_folder_without_its_receipt_and_ledger_is_not_a_new_one(tmp_path):
    """The ids of its earlier requests would be lost, and their samples remembered again."""
    fulfil(request(tmp_path))
    for name in ("receipt.json", "ledger.jsonl"):
        (tmp_path / "out" / name).unlink()
    before = contents(tmp_path)
    with pytest.raises(InputError, match="out: must be as `expunge unlearn` left it; found receipt.json: must be in the folder"):
        fulfil(request(tmp_path, "50"))
    assert contents(tmp_path) == before


def test_strange_files_in_the_folder_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("dear")
    with pytest.raises(InputError, match="must be a folder that is new, empty"):
        fulfil(request(tmp_path))
    assert contents(tmp_path / "out") == {path.relative_to(tmp_path / "out"): b"dear" for path in [tmp_path / "out" / "thesis.txt"]}


def test_two_requests_at_once_are_refused(tmp_path):
    asked = request(tmp_path)
    with reserved("out", tmp_path / "out", "requests"):
        with pytest.raises(InputError, match="must not be in use"):
            fulfil(asked)
    fulfil(asked)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    with small_disk(tmp_path, 160_000) as disk:
        fulfil(request(tmp_path, "0-3", out="disk/out"))
        before = contents(disk)
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 20_000))
        with pytest.raises(OSError, match="No space left"):
            fulfil(request(tmp_path, "9", out="disk/out"))
        (disk / "ballast").unlink()
        assert contents(disk) == before


def test_the_recipe_says_how_to_train():
    recipe = Tuning(Constant(0.3, epochs=20), batch_size=7)
    assert build_method(Settings(), recipe).rate == 0.3
    assert build_method(Settings("retrain"), recipe).tuning == recipe
    tuned = build_method(Settings("finetune"), recipe).tuning
    assert tuned.batch_size == 7 and tuned.schedule.epochs == 5 and tuned.schedule.rate(1) == 0.3
    assert build_method(Settings("fisher-mask", ("tuning=None", "kind=expected")), recipe).tuning is None
    assert build_method(replace(MASK, method="fisher-mask-released"), None).kind == "batch"


def test_the_model_of_a_method_that_trains_is_undone_too(tmp_path):
    from expunge.requests.undo import undo

    receipt = fulfil(request(tmp_path, settings=Settings("finetune", threads=1)))
    assert undo(tmp_path / "out", tmp_path / "back.safetensors") == receipt.weights_before
    back, before = load_file(tmp_path / "back.safetensors"), load_file(tmp_path / "model.safetensors")
    assert back.keys() == before.keys()
    assert all(torch.equal(back[name].reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)) for name in before)
