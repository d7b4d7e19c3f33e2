"""Means and standard deviations over seeds."""

import re
from pathlib import Path

import numpy as np
import pytest

import expunge
from expunge.report.aggregate import aggregate


def test_it_is_numpys_mean_and_sample_deviation():
    values = [0.1, 0.4, 0.35]
    ours = aggregate(values)
    assert (ours.mean, ours.sd, ours.count) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)), 3)


def test_too_few_values_have_none():
    assert (aggregate([0.5]).mean, aggregate([0.5]).sd) == (0.5, None)
    assert (aggregate([]).mean, aggregate([]).sd, aggregate([]).count) == (None, None, 0)


def test_there_is_no_other_place():
    source = Path(expunge.__file__).parent
    others = [path.name for path in source.rglob("*.py") if re.search(r"\b(stdev|variance|pstdev)\(", path.read_text())]
    assert others == ["aggregate.py"]
    assert not [path.name for path in (source / "report").glob("*.py") if path.name != "aggregate.py" and "fmean" in path.read_text()]
