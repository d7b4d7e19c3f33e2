"""Files that a task imports from its folder: all are found, the receipt covers them, and verification names those that differ."""

import json
import sys

import pytest

from expunge.requests.canonical import canonical, digest
from expunge.requests.folder import ledger_at
from expunge.requests.ledger import written
from expunge.requests.receipt import read_receipt
from expunge.requests.request import fulfil
from expunge.requests.settings import Settings
from expunge.requests.sources import imported_files
from expunge.requests.task import load_task
from expunge.requests.verifying import verify
from tests.requests.small import TASK, request, write_task

HELPED = "import torch\nfrom helping_hand import SAMPLES\n" + TASK.replace("points(120, 1)", "points(SAMPLES, 1)")


@pytest.fixture(autouse=True)
def no_modules_are_left():
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("helping_hand", "parts"):
            del sys.modules[name]


def wrong(*arguments, **others):
    return [finding.line for finding in verify(*arguments, **others) if not finding.fits]


def put(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/', 1) if name.startswith('parts') else name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)


def test_imports_of_all_forms_are_followed(tmp_path):
    put(
        tmp_path,
        parts____init__="from . import second",
        parts__first="from .third import x",
        parts__second="from ..outside import y",  # beyond the folder: Python refuses it
        parts__third="def late():\n    import sixth, json",
        fourth="from importlib import import_module\nimport_module('fifth')",
        fifth="import missing_everywhere",
        sixth="import seventh.inner",
        never="import fourth",
        json="the standard library's is the one that is imported",
    )
    (tmp_path / "seventh").mkdir()  # a package without __init__.py
    (tmp_path / "seventh" / "inner.py").write_text("def (")
    (tmp_path / "task.py").write_text("import parts.first, torch\nif False:\n    import fourth\n")
    expected = ["fifth.py", "fourth.py", "parts/__init__.py", "parts/first.py", "parts/second.py", "parts/third.py", "seventh/inner.py"]
    found = imported_files(tmp_path / "task.py")
    assert sorted(found) == sorted([*expected, "sixth.py"])
    assert all(found[name] == digest((tmp_path / name).read_bytes()) for name in found)


def test_a_file_that_differs_is_named(tmp_path):
    put(tmp_path, helping_hand="SAMPLES = 120")
    write_task(tmp_path, HELPED)
    receipt = fulfil(request(tmp_path))
    assert receipt.sources == {"helping_hand.py": digest(b"SAMPLES = 120")}
    path, task = tmp_path / "out" / "receipt.json", tmp_path / "mytask.py"
    assert "helping_hand.py: the file of the receipt" in [finding.line for finding in verify(path, task=task)]
    assert wrong(path, task=task) == []
    put(tmp_path, helping_hand="SAMPLES = 100 + 20")
    assert wrong(path, task=task) == ["helping_hand.py: the file of the receipt"]
    put(tmp_path, helping_hand="import parts.first\nSAMPLES = 120", parts__first="")
    assert wrong(path, task=task)[1:] == ["parts/first.py: imported by the task now, not so in the receipt"]
    write_task(tmp_path)
    assert wrong(path, task=task)[1:] == ["helping_hand.py: not imported by the task now, but in the receipt"]


def test_a_helper_that_was_changed_is_imported_again(tmp_path):
    """As in a notebook: a receipt must not have the digest of a file that was not run."""
    put(tmp_path, helping_hand="SAMPLES = 120")
    write_task(tmp_path, HELPED)
    assert load_task(tmp_path / "mytask.py").rows.samples == 120
    put(tmp_path, helping_hand="SAMPLES = 60")
    assert load_task(tmp_path / "mytask.py").rows.samples == 60


def test_the_file_of_a_method_of_ones_own_is_covered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom expunge import FisherMask\n"
        "@dataclass(frozen=True)\nclass Mine:\n    def __call__(self, model, forget, remain, run):\n"
        "        return FisherMask(tuning=None)(model, forget, remain, run)\n"
    )
    receipt = fulfil(request(tmp_path, settings=Settings("mine.py:Mine", threads=1)))
    assert receipt.sources == {"mine.py:Mine": digest((tmp_path / "mine.py").read_bytes())}
    path = tmp_path / "out" / "receipt.json"
    assert wrong(path, task=tmp_path / "mytask.py") == []
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "\n")
    assert wrong(path, task=tmp_path / "mytask.py") == ["mine.py:Mine: the file of the receipt"]


def test_receipts_from_before_are_verified_as_they_are(tmp_path):
    put(tmp_path, helping_hand="SAMPLES = 120")
    write_task(tmp_path, HELPED)
    fulfil(request(tmp_path))
    out = tmp_path / "out"
    old = json.loads((out / "receipt.json").read_bytes())
    del old["sources"]
    (out / "receipt.json").write_bytes(canonical(old))
    (out / "ledger.jsonl").write_bytes(written((*ledger_at(out / "ledger.jsonl")[:-1], read_receipt(canonical(old)).entry())))
    findings = list(verify(out / "receipt.json", task=tmp_path / "mytask.py"))
    assert all(finding.fits for finding in findings)
    assert "not compared: helping_hand.py: imported by the task, not in receipts of this age" in map(str, findings)
    fulfil(request(tmp_path, "50"))
    assert wrong(out / "receipt.json", task=tmp_path / "mytask.py") == []
