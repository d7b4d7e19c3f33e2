"""The auditor is audited: a handful of networks of the digits; benchmarks/audit_errors.py has the numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy
import pytest
from scipy import stats

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "audit_errors.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("audit_errors", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_errors"] = module
    sys.path.insert(0, str(PROGRAM.parent))  # as for a program that is run from there
    spec.loader.exec_module(module)
    return module


def test_retrained_networks_pass_and_cheats_do_not(program, tmp_path):
    networks = program.Networks(tmp_path, program.SETUPS["digits"](epochs=5, count=2))
    names = ("retrained", "classifier masked", "logit filter", "original itself", "random weights", "neighbours' leak")
    asked = [program.Case("retrained", 4, 1, 1), *(program.Case(name, 4, 0, 1) for name in names)]
    words = {case: program.verdict(case, networks).verdict.word for case in asked}
    assert not {case: word for case, word in words.items() if word not in program.EXPECTED[case.name]}


def test_every_kind_is_asked_and_nothing_twice(program):
    asked = [*program.cases((1, 5, 8), count=20, few=7)]
    assert len(asked) == len({*asked})
    counts = {key: sum((case.name, case.references) == key for case in asked) for key in {(case.name, case.references) for case in asked}}
    assert counts["retrained", 11] == counts["retrained", 1] == counts["classifier masked", 0] == 60
    assert {references for _, references in counts} == {0, 1, 5, 11} and len(counts) == 4 * len(program.EXPECTED)
    assert all(counts[name, references] >= 21 for name, references in counts)


def test_no_network_is_its_own_reference(program, tmp_path, monkeypatch):
    networks = program.Networks(tmp_path, program.SETUPS["digits"](count=40))
    monkeypatch.setattr(networks, "retrained", lambda label, number: number)
    for number in range(40):
        others = networks.references(program.Case("retrained", 1, number, 11))
        assert len({*others}) == 11 and number not in others and {other // 20 for other in others} == {number // 20}


def test_the_table_counts_what_is_right(program):
    rows = [{"name": "retrained", "references": 1, "verdict": word} for word in ("partly", "not distinguished", "not distinguished")]
    (row,) = program.table(rows)
    assert (row["n"], row["right"], row["verdicts"]) == (3, pytest.approx(2 / 3), {"not distinguished": 2, "partly": 1})
    assert row["low"] < 2 / 3 < row["high"]
    assert program.markdown([row]).splitlines()[2] == "| retrained | 2 of 3 (9–99 %): 2 not distinguished, 1 partly |"


def test_rankings_are_compared_as_scipy_does(program):
    """`program` has put the folder of the benchmarks on the path."""
    table = importlib.import_module("audit_rank_table")
    numbers = numpy.random.default_rng(0)
    for _ in range(20):
        first, second = numbers.integers(0, 6, (2, 9)).astype(float)  # with ties
        assert float(table.spearman(first, second)) == pytest.approx(stats.spearmanr(first, second).statistic)
        assert table.kendall(first, second) == pytest.approx(stats.kendalltau(first, second).statistic)
