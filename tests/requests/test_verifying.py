"""Verification: any changed byte in any file is found, and what does not fit is named."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from expunge.errors import InputError
from expunge.requests.canonical import canonical
from expunge.requests.folder import misfits
from expunge.requests.request import fulfil
from expunge.requests.settings import Settings
from expunge.requests.task import load_task
from expunge.requests.undo import undo
from expunge.requests.verifying import prove, verify
from tests.requests.small import TASK, request, write_task

MUTATIONS = int(os.environ.get("EXPUNGE_MUTATIONS", "2000"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two requests in one folder."""
    folder = tmp_path_factory.mktemp("made")
    fulfil(request(folder, "0-9"))
    fulfil(request(folder, "11,13,17"))
    return folder


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def wrong(*arguments, **others):
    return [finding.line for finding in verify(*arguments, **others) if not finding.fits]


def mutated(content, generator):
    """One byte changed, removed or added, a piece cut, or the whole replaced by nothing."""
    content = bytearray(content)
    place = generator.randrange(len(content))
    match generator.randrange(6):
        case 0 | 1:
            content[place] ^= 1 << generator.randrange(8)
        case 2:
            content[place] = (content[place] + generator.randrange(1, 256)) % 256
        case 3:
            del content[place]
        case 4:
            content.insert(place, generator.randrange(256))
        case 5:
            del content[place:]
    return bytes(content)


def every_mutation_is_found(folder, number, generator):
    names = sorted(os.listdir(folder))
    originals = {name: (folder / name).read_bytes() for name in names}
    missed = []
    for _ in range(number):
        name = generator.choice(names)
        changed = mutated(originals[name], generator)
        if changed == originals[name]:  # an inserted byte may equal its neighbour's, at the end of a run
            continue
        (folder / name).write_bytes(changed)
        if next(misfits(folder), None) is None:
            missed.append((name, changed))
        (folder / name).write_bytes(originals[name])
    return missed


def test_any_changed_byte_is_found(copy):
    assert every_mutation_is_found(copy / "out", 150, random.Random(0)) == []


@pytest.mark.slow
def test_thousands_of_mutations_are_found(copy):
    assert every_mutation_is_found(copy / "out", MUTATIONS, random.Random(1)) == []


def test_every_byte_of_the_ledger_and_the_receipt_counts(copy):
    for name in ("ledger.jsonl", "receipt.json"):
        path = copy / "out" / name
        content = path.read_bytes()
        for place in range(0, len(content), 23):
            path.write_bytes(content[:place] + bytes([content[place] ^ 32]) + content[place + 1 :])
            assert next(misfits(copy / "out"), None) is not None, (name, place)
        path.write_bytes(content)


def test_all_of_it_fits_and_is_replayed(made):
    out = made / "out"
    findings = list(verify(out / "receipt.json", out / "weights.safetensors", made / "mytask.py"))
    assert all(finding.fits for finding in findings)
    assert [finding.line for finding in findings[-2:]] == [
        "replayed: the same weights, to the bit",
        "replayed: the same measures before and after",
    ]


def test_a_method_that_is_chosen_and_trains_is_replayed(tmp_path):
    fulfil(request(tmp_path, "label=1", settings=Settings(given=("epochs=12",), threads=1)))
    assert wrong(tmp_path / "out" / "receipt.json", task=tmp_path / "mytask.py") == []


def test_an_added_and_a_missing_file_are_named(copy):
    (copy / "out" / "notes.txt").write_text("x")
    (copy / "out" / "log.txt").unlink()
    assert wrong(copy / "out" / "receipt.json") == ["log.txt: is missing", "notes.txt: is not a file of the receipt"]


def test_without_the_ids_the_folder_still_verifies(copy):
    (copy / "out" / "openings.json").unlink()
    receipt = copy / "out" / "receipt.json"
    assert wrong(receipt) == []
    assert wrong(receipt, task=copy / "mytask.py")[0].startswith("openings.json: is missing")
    with pytest.raises(InputError, match="must hold openings.json, the ids of earlier requests"):
        fulfil(request(copy, "50"))
    with pytest.raises(InputError, match="folder: must hold openings.json, the ids, which are not handed on"):
        prove(copy / "out", 5, copy / "proof.json")


def test_weights_are_named_for_what_they_are(made, tmp_path):
    receipt = made / "out" / "receipt.json"
    assert wrong(receipt, made / "out" / "weights.safetensors") == []
    after = load_file(made / "out" / "weights.safetensors")
    torch.save({"state_dict": {f"module.{name}": value for name, value in after.items()}, "epoch": 1}, tmp_path / "in-use.pt")
    assert wrong(receipt, tmp_path / "in-use.pt") == []
    assert wrong(receipt, made / "model.safetensors")[0].endswith("the weights before, with what was to be forgotten")
    save_file({name: value * 0 for name, value in load_file(made / "model.safetensors").items()}, tmp_path / "other.safetensors")
    assert wrong(receipt, tmp_path / "other.safetensors")[0].endswith("neither the weights after nor those before")


def test_tied_weights_are_told_by_a_receipt_alone(tmp_path):
    """Its folder's file, which says what is tied, need not have been handed on: the file that is given says so, too."""
    tied = (
        "    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 4))\n    model[2].weight = model[0].weight\n"
    )
    text = f"{TASK}\ndef model():\n{tied}    return model\n"
    write_task(tmp_path, text)
    save_model(load_task(tmp_path / "mytask.py").model, tmp_path / "model.safetensors")
    fulfil(request(tmp_path))
    (tmp_path / "handed").mkdir()
    for name in ("receipt.json", "ledger.jsonl"):
        shutil.copy(tmp_path / "out" / name, tmp_path / "handed")
    proof = prove(tmp_path / "out", 5, tmp_path / "proof.json")
    assert wrong(tmp_path / "handed" / "receipt.json", tmp_path / "out" / "weights.safetensors", proof=proof) == []


def test_a_task_with_other_data_does_not_fit(copy):
    write_task(copy, TASK.replace("points(120, 1)", "points(120, 9)"))
    lines = wrong(copy / "out" / "receipt.json", task=copy / "mytask.py")
    assert lines[0].endswith("mytask.py: the task file of the receipt") and lines[1] == "train(): the data of the receipt"
    assert lines[-1] == "replayed: other weights than those of the receipt"


def test_a_rewritten_settings_file_does_not_replay_to_the_same_weights(copy):
    """All digests made to fit again: only the replay, or a signature, finds it."""
    out = copy / "out"
    settings = json.loads((out / "settings.json").read_bytes())
    settings["given"] = ["ratio=0.2", "tuning=None"]
    (out / "settings.json").write_bytes(canonical(settings))
    receipt = json.loads((out / "receipt.json").read_bytes())
    from expunge.requests.canonical import digest
    from expunge.requests.folder import ledger_at
    from expunge.requests.ledger import written
    from expunge.requests.receipt import read_receipt

    receipt["settings"] = receipt["files"]["settings.json"] = digest((out / "settings.json").read_bytes())
    (out / "receipt.json").write_bytes(canonical(receipt))
    ledger = ledger_at(out / "ledger.jsonl")
    (out / "ledger.jsonl").write_bytes(written((*ledger[:-1], read_receipt(canonical(receipt)).entry())))
    assert wrong(out / "receipt.json") == []
    assert wrong(out / "receipt.json", task=copy / "mytask.py") == ["replayed: other weights than those of the receipt"]


def test_a_receipt_that_leads_out_of_its_folder_is_named(copy):
    receipt = json.loads((copy / "out" / "receipt.json").read_bytes())
    receipt["files"]["../model.safetensors"] = "0" * 64
    (copy / "out" / "receipt.json").write_bytes(canonical(receipt))
    assert "../model.safetensors: is no name of a file" in wrong(copy / "out" / "receipt.json")


def test_a_proof_of_one_id(made, tmp_path):
    receipt = made / "out" / "receipt.json"
    for number, request_number in ((5, 1), (13, 2)):
        proof = prove(made / "out", number, tmp_path / f"proof-{number}.json")
        assert wrong(receipt, proof=proof) == [] and json.loads(proof.read_bytes())["request"] == request_number
    content = json.loads(proof.read_bytes())
    for change in ({"id": 14}, {"request": 1}, {"request": 2.0}, {"salt": "zz"}, {"beside": []}, {"request": 9}, {"more": 1}):
        (tmp_path / "proof.json").write_text(json.dumps(content | change))
        assert len(wrong(receipt, proof=tmp_path / "proof.json")) == 1, change
    handed = tmp_path / "handed"
    handed.mkdir()
    (handed / "receipt.json").write_bytes(receipt.read_bytes())
    (tmp_path / "proof.json").write_text(json.dumps(content))
    told = wrong(handed / "receipt.json", proof=tmp_path / "proof.json")
    assert "proof.json: cannot be checked without the ledger (ledger.jsonl: must be in the folder" in told[-1]
    (handed / "ledger.jsonl").write_bytes((made / "out" / "ledger.jsonl").read_bytes())
    for proof in (tmp_path / "proof.json", handed / "proof.json"):
        if not proof.exists():
            shutil.copy(tmp_path / "proof.json", proof)
        assert [str(finding) for finding in verify(handed / "receipt.json", proof=proof)] == [
            "fits: receipt.json and ledger.jsonl fit each other",
            "not compared: the other files of the receipt, which are not here",
            f"fits: {proof}: sample 13 is among those of request 2",
        ]
    assert "weights.safetensors: is missing" in wrong(handed / "receipt.json")
    shutil.copy(made / "out" / "log.txt", handed)  # a part of the folder is no receipt alone
    assert "weights.safetensors: is missing" in wrong(handed / "receipt.json", proof=handed / "proof.json")
    with pytest.raises(InputError, match="id: must be of a sample that was forgotten; found 12"):
        prove(made / "out", 12, tmp_path / "twelve.json")
    for strange in (5.0, "5", True):
        with pytest.raises(InputError, match="id: must be of a sample that was forgotten; found "):
            prove(made / "out", strange, tmp_path / "strange.json")
    assert wrong(receipt, proof=prove(made / "out", torch.tensor([5]).numpy()[0], tmp_path / "five.json")) == []
    with pytest.raises(InputError, match="proof: must be a file that `expunge prove` wrote; found "):
        wrong(receipt, proof=tmp_path / "nowhere.json")


def test_a_proof_may_lie_in_the_folder_when_the_edit_is_replayed(copy):
    proof = shutil.move(prove(copy / "out", 13, copy / "proof.json"), copy / "out" / "proof.json")
    assert wrong(copy / "out" / "receipt.json", task=copy / "mytask.py", proof=proof) == []


def test_a_proof_needs_none_of_the_files_that_a_final_request_deletes(copy, tmp_path):
    out = copy / "out"
    for name in ("patch.safetensors", "edit.safetensors"):
        (out / name).unlink()
    assert json.loads(prove(out, 13, tmp_path / "proof.json").read_bytes())["id"] == 13
    (out / "log.txt").write_text("x")
    with pytest.raises(InputError, match="folder: must be as .* log.txt: was changed"):
        prove(out, 13, tmp_path / "another.json")


@pytest.mark.parametrize("write", [lambda out, path: prove(out, 5, path), undo], ids=["prove", "undo"])
def test_what_is_written_replaces_nothing_and_leaves_the_folder_as_it_is(write, copy):
    before = (copy / "mytask.py").read_bytes()
    new, outside = "must be a new file", "must not be in a folder of requests"
    for name, told in {"mytask.py": new, "out/receipt.json": new, "out/new.safetensors": outside}.items():
        with pytest.raises(InputError, match=f"out: {told}"):
            write(copy / "out", copy / name)
    assert (copy / "mytask.py").read_bytes() == before and list(misfits(copy / "out")) == []


def test_a_receipt_may_be_named_by_its_folder(made):
    assert [*verify(made / "out")] == [*verify(made / "out" / "receipt.json")]


def test_what_a_stopped_request_left_in_a_mount_point_is_not_in_the_way(copy, tmp_path):
    """A folder that cannot be renamed has its lock and its unfinished work inside."""
    (copy / "out" / ".expunge-lock").touch()
    (copy / "out" / ".expunge-work").mkdir()
    assert wrong(copy / "out" / "receipt.json", task=copy / "mytask.py") == []
    undo(copy / "out", tmp_path / "back.safetensors")
    prove(copy / "out", 5, tmp_path / "proof.json")


@pytest.mark.parametrize("path", ["nowhere/receipt.json", "mytask.py", "."])
def test_a_receipt_must_be_one(path, made):
    with pytest.raises(InputError, match="receipt: must be the receipt.json of a folder"):
        list(verify(made / path))


def test_undo_refuses_a_folder_that_was_changed_and_a_file_that_is_there(copy, tmp_path):
    with pytest.raises(InputError, match="out: must be a new file"):
        undo(copy / "out", copy / "model.safetensors")
    (copy / "out" / "patch.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="patch.safetensors: was changed"):
        undo(copy / "out", tmp_path / "back.safetensors")
    with pytest.raises(InputError, match="folder: must be a folder of requests"):
        undo(tmp_path, tmp_path / "back.safetensors")
    with pytest.raises(InputError, match=r"out: must end in .safetensors; found .*back\.pt"):
        undo(copy / "out", tmp_path / "back.pt")
    assert not (tmp_path / "back.safetensors").exists()
