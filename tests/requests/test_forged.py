"""Folders whose files were rewritten in accord, so that all digests fit: what they say must fit, too."""

import json
import shutil

import pytest

from expunge.errors import InputError
from expunge.requests.canonical import canonical, digest
from expunge.requests.folder import ledger_at
from expunge.requests.ledger import written
from expunge.requests.receipt import read_receipt
from expunge.requests.request import fulfil
from expunge.requests.verifying import verify
from tests.requests.small import request


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    fulfil(request(folder, "0-9"))
    fulfil(request(folder, "11,13,17"), examine=audited)
    return folder


def audited(made, folder):
    (folder / "audit.json").write_text(json.dumps({"verdict": {"word": "caught"}, "retrained": 0, "measures": []}))
    return {"audit": {"verdict": {"word": "caught"}, "retrained": 0}}


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def forge(out, changes=(), without=(), **says):
    """Change settings and a receipt, leave files out, and make all digests and the ledger fit again."""
    content = json.loads((out / "settings.json").read_bytes()) | dict(changes)
    (out / "settings.json").write_bytes(canonical(content))
    for name in without:
        (out / name).unlink()
    receipt = json.loads((out / "receipt.json").read_bytes())
    receipt["files"] = {name: digest((out / name).read_bytes()) for name in receipt["files"] if name not in without}
    receipt |= {"settings": receipt["files"].get("settings.json", receipt["settings"])} | says
    (out / "receipt.json").write_bytes(canonical(receipt))
    ledger = ledger_at(out / "ledger.jsonl")
    (out / "ledger.jsonl").write_bytes(written((*ledger[:-1], read_receipt(canonical(receipt)).entry())))


def told(folder, task=False):
    findings = verify(folder / "out" / "receipt.json", task=folder / "mytask.py" if task else None)
    return [str(finding) for finding in findings if not (finding.fits and finding.compared)]


@pytest.mark.parametrize(
    "says, line",
    [
        ({"forgotten": 100}, "receipt.json: says otherwise than ledger.jsonl: 100 samples forgotten, and 13 there"),
        ({"method": "Retrain()"}, "receipt.json: says otherwise than settings.json: used"),
        ({"settings": "0" * 64}, "receipt.json: says otherwise than its list of files: settings.json"),
        ({"mask": "0" * 64}, "receipt.json: says otherwise than its list of files: edit.safetensors"),
        (
            {"measured": {"audit": {"verdict": {"word": "cleared"}, "retrained": 0}}},
            "receipt.json: says otherwise than audit.json: verdict",
        ),
        ({"without": ["weights.safetensors"]}, "weights.safetensors: is not listed by receipt.json"),
        ({"without": ["settings.json"]}, "settings.json: is not listed by receipt.json"),
    ],
)
def test_a_receipt_that_contradicts_its_folder_is_found(says, line, copy):
    forge(copy / "out", **says)
    assert told(copy)[0] == f"DOES NOT FIT: {line}"
    with pytest.raises(InputError, match="out: must be as `expunge unlearn` left it"):
        fulfil(request(copy, "50"))


def test_other_words_about_what_it_does_not_prove_are_told(copy):
    forge(copy / "out", does_not_prove=["It proves that nothing is left."])
    assert told(copy) == ["not compared: does_not_prove of receipt.json: in other words than this version's"]


def test_other_measures_are_found_by_a_replay(copy):
    receipt = json.loads((copy / "out" / "receipt.json").read_bytes())
    receipt["measured"]["accuracies"][1]["accuracies"]["forget"] = 0.0
    forge(copy / "out", measured=receipt["measured"])
    assert told(copy) == []
    assert told(copy, task=True) == ["DOES NOT FIT: replayed: other accuracies than those of the receipt"]


def test_another_method_is_found_by_a_replay(copy):
    forge(copy / "out", {"used": "Retrain()"}, method="Retrain()")
    assert told(copy) == []
    assert told(copy, task=True)[0].endswith(", and not by Retrain()")


@pytest.mark.parametrize(
    "settings",
    [{"threads": 10**6}, {"threads": -3}, {"batch_size": 0}, {"sums_threads": 0}, {"given": [1]}, {"built": 3}, {"used": None}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_are_none_are_one_line(settings, copy):
    """A million threads end the process."""
    forge(copy / "out", settings)
    assert any("settings.json: must hold the settings of a request (" in line for line in told(copy, task=True))


def test_a_device_that_is_not_here_is_told(copy):
    code = json.loads((copy / "out" / "receipt.json").read_bytes())["code"]
    forge(copy / "out", {"device": "cuda:99"}, code=code | {"device": "cuda:99"})
    assert told(copy, task=True) == ["not compared: replayed: it was made on cuda:99, which is not here"]


def test_data_that_are_not_named_are_one_line(copy):
    receipt = json.loads((copy / "out" / "receipt.json").read_bytes())
    (copy / "out" / "receipt.json").write_bytes(canonical(receipt | {"data": {}}))
    assert "receipt.json: must be a receipt of `expunge unlearn`" in told(copy)[0]
