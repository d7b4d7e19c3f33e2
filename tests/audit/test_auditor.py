"""The auditor is audited: a handful of networks of the digits; benchmarks/audit_errors.py has the numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "audit_errors.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("audit_errors", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_errors"] = module
    spec.loader.exec_module(module)
    return module


def test_retrained_networks_pass_and_cheats_do_not(program, tmp_path):
    networks = program.Networks(tmp_path, epochs=5)
    found = {}
    for case in program.cases(networks, references=1, labels=(4,), originals=1, retrained=2, few=0):
        found[case.name, case.number] = program.verdict(case, networks).verdict.word
    assert len(found) == 2 + 4
    wrong = {case: word for case, word in found.items() if word not in program.EXPECTED[case[0]]}
    assert not wrong


def test_the_table_counts_what_is_right(program):
    rows = [{"name": "retrained", "references": 1, "verdict": word} for word in ("not distinguished", "not distinguished", "partly")]
    (row,) = program.table(rows)
    assert (row["n"], row["right"], row["verdicts"]) == (3, pytest.approx(2 / 3), {"not distinguished": 2, "partly": 1})
    assert row["low"] < 2 / 3 < row["high"]
