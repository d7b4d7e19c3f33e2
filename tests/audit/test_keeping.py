"""What is kept of an audit: by the code that computed it, in standard JSON, infinities too."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

import expunge
from expunge.audit import keeping
from expunge.audit.findings import Curve, Pictures
from expunge.audit.intervals import Interval
from expunge.audit.keeping import Folder
from expunge.audit.measures import at_bits, beside_original, probes
from expunge.audit.reading import read
from expunge.audit.relearning import relearn
from expunge.audit.rounding import rounded
from expunge.audit.strata import stratified_auc
from expunge.metrics import relearn_curve
from expunge.metrics.membership import area_under_curve
from expunge.metrics.probing import fitted
from tests.audit.small import parts, trained

VALUES = Mapping[str, Interval]


def fail():
    pytest.fail("computed again")


def test_a_part_of_other_code_is_computed_anew(tmp_path, monkeypatch):
    keep = Folder(tmp_path)
    first = keep("probes", VALUES, lambda: {"probe": Interval(0.5, 0.4, 0.6)})
    assert keep("probes", VALUES, fail) == first
    monkeypatch.setattr(keeping, "version", lambda: "of another code")
    second = keep("probes", VALUES, lambda: {"probe": Interval(0.7, 0.6, 0.8)})
    assert second["probe"].value == 0.7 and len([*tmp_path.iterdir()]) == 2
    monkeypatch.undo()
    assert keep("probes", VALUES, fail) == first


def test_a_part_without_a_version_is_not_read(tmp_path, monkeypatch):
    """As the files of earlier versions are, wherever they lie."""
    keep = Folder(tmp_path)
    keep("probes", VALUES, lambda: {"probe": Interval(0.5, 0.4, 0.6)})
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"key": "probes"}))
    assert keep("probes", VALUES, lambda: {"probe": Interval(0.7, 0.6, 0.8)})["probe"].value == 0.7


def test_the_version_is_of_every_module_that_computes_parts(monkeypatch):
    functions = (probes, beside_original, at_bits, relearn, read, rounded, stratified_auc, fitted, relearn_curve, area_under_curve)
    assert {inspect.getmodule(function) for function in functions} <= {*keeping.COMPUTING}
    keeping.version.cache_clear()
    before = keeping.version()
    monkeypatch.setattr(keeping.COMPUTING[0], "__file__", keeping.COMPUTING[1].__file__)
    keeping.version.cache_clear()
    changed = keeping.version()
    monkeypatch.undo()
    keeping.version.cache_clear()
    assert before == keeping.version() != changed


def test_infinite_losses_come_back_and_nan_is_never_kept(tmp_path):
    keep, curve = Folder(tmp_path), Curve((math.inf, 2.0), (0.0, 0.5), (0.0, 0.25))
    assert keep("curve", Curve | None, lambda: curve) == curve == keep("curve", Curve | None, fail)
    with pytest.raises(ValueError, match="NaN"):
        keep("broken", Curve, lambda: replace(curve, losses=(math.nan,)))
    assert len([*tmp_path.iterdir()]) == 1


def refuse(name):
    raise AssertionError(f"{name} is not standard JSON")


def test_an_audit_with_infinities_is_standard_json_and_reads_back(tmp_path):
    report = expunge.audit(trained(0), trained(20, without=True), *parts(), settings=expunge.audit.Settings(rounds=0, bits=()))
    first = replace(report.measures[0], after=Interval(math.inf, -math.inf, math.inf))
    pictures = Pictures(report.pictures.losses, {"after": Curve((math.inf, 1.0), (0.0, 1.0), (0.0, 1.0))})
    infinite = replace(report, measures=(first, *report.measures[1:]), pictures=pictures)
    folder = infinite.save(tmp_path / "out")
    assert json.loads((folder / "result.json").read_text(), parse_constant=refuse)["audit"]["measures"][0]["after"]["value"] == "Infinity"
    assert expunge.audit.load_audit(folder) == infinite
    broken = replace(report, measures=(replace(first, after=Interval(math.nan, 0.0, 1.0)), *report.measures[1:]))
    with pytest.raises(ValueError, match="NaN"):
        broken.save(tmp_path / "broken")
    assert not (tmp_path / "broken" / "result.json").exists()
