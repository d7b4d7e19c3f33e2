"""Forget samples that are unlike the others: wrong labels, or samples easier or harder than the unseen ones."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import expunge
from expunge.audit.findings import Reason
from expunge.audit.intervals import Interval
from expunge.audit.judging import ALIKE, judge, unlike_others
from expunge.audit.measures import ATTACK, RMIA, Subject
from tests.audit.small import CLASSES, clouds, fresh
from tests.audit.test_judging import POLICY, row

QUICK = expunge.audit.Settings(rounds=0)


def mistaken() -> tuple[Subset, Subset, TensorDataset]:
    """Samples with wrong labels, which are to be forgotten, the remain samples, and both together."""
    inputs, labels = clouds().tensors
    wrong = torch.arange(len(labels)) % 5 == 0
    data = TensorDataset(inputs, torch.where(wrong, (labels + 1) % CLASSES, labels))
    forget, remain = (Subset(data, torch.where(rows)[0].tolist()) for rows in (wrong, ~wrong))
    return forget, remain, data


def test_a_network_that_never_saw_wrong_labels_is_not_accused_of_finding_them_hard():
    forget, remain, data = mistaken()
    networks = [fresh(seed) for seed in (0, 1, 2)]
    for network, known in zip(networks, (data, remain, remain), strict=True):
        expunge.train(network, known, expunge.Tuning(expunge.Constant(0.05, 20), batch_size=32))
    original, retrained, other = networks
    report = expunge.audit(original, retrained, forget, remain, clouds(240, seed=1), out=[other], settings=QUICK)
    assert all(report[name].after.high < 0.5 - POLICY.known_area for name in (ATTACK, RMIA))  # told, by what they are
    assert report.verdict.word == "cannot tell" and ALIKE in report.verdict.missing
    assert "though it was trained on both" in report.verdict.reasons[0].words
    beside = expunge.audit(original, retrained, forget, remain, clouds(240, seed=1), [other], settings=QUICK)
    assert beside.verdict.word == "not distinguished"
    nothing_done = expunge.audit(original, copy.deepcopy(original), forget, remain, clouds(240, seed=1), settings=QUICK)
    assert nothing_done.verdict.word == "partly"


def test_samples_that_a_network_never_trained_on_them_finds_hard_are_hard_for_another():
    """The original knows them as well as all others, and so shows nothing."""
    labels = torch.arange(200) % 2
    part = SimpleNamespace(labels=labels, losses=torch.zeros(200).double(), of_labels=lambda wanted: torch.isin(labels, wanted))
    before = {"forget": part, "remain": part}
    samples = Subject("samples", torch.tensor([0, 1]), torch.tensor([]))

    def found(low, high, subject=samples):
        return unlike_others(before, {"out 1": {ATTACK: Interval((low + high) / 2, low, high)}}, subject, POLICY)

    assert found(0.45, 0.55) is None and found(0.6, 0.7) is None and found(0.4, 0.48) is None
    assert "out 1, which was never trained on forget samples, finds them harder than unseen ones, area 0.3" in found(0.2, 0.4).words
    assert found(0.2, 0.4, Subject("classes", samples.labels, samples.labels)) is None


@pytest.mark.parametrize("name", [ATTACK, RMIA, f"{ATTACK}, 4 bits"])
def test_losses_convict_samples_like_the_others_alone(name):
    measures = [row(name, 0.9, 0.9)]
    assert judge(measures, "samples", POLICY).word in ("partly", "cosmetic")
    assert judge(measures, "samples", POLICY, unlike=Reason("", ATTACK, 0.2, 0.1, 0.3)).word == "cannot tell"
