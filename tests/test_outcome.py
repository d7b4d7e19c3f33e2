"""An outcome is shown in a few lines."""

import re

import pytest
import torch
from torch import nn

from expunge import Finetune, FisherMask, Outcome, Patch, Record, fisher, unlearn
from tests.methods import cases
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
    first, last = (100 * outcome.history[index].accuracies["forget"] for index in (0, -1))
    assert lines[1].split() == ["accuracy", "epoch", "0", "epoch", "2"]
    assert lines[3].split() == ["forget", f"{first:.1f}", "%", f"{last:.1f}", "%"]
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
