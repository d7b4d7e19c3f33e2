"""Attacks on single samples within an audit: the mix of labels tells nothing, membership does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from expunge.audit.measures import IAM, RMIA
from expunge.audit.membership import Probabilities, rmia_rates
from expunge.audit.per_sample import per_sample_attacks

EASY, HARD = 4.0, -2.0  # φ of the samples of two labels, on average


def read_by(seed, labels, known=0.0):
    """φ of a network: by the label's difficulty, and larger where the network knows the forget samples."""
    numbers = torch.Generator().manual_seed(seed)
    parts = {}
    for name, rows in labels.items():
        signals = torch.where(rows == 0, EASY, HARD).double() + torch.randn(len(rows), generator=numbers, dtype=torch.float64)
        parts[name] = SimpleNamespace(labels=rows, signals=signals + known * (name == "forget"))
    return parts


def mixed(easy, hard):
    return torch.cat([torch.zeros(easy), torch.ones(hard)]).long()[torch.randperm(easy + hard, generator=torch.Generator().manual_seed(9))]


@pytest.fixture
def labels():
    return {"forget": mixed(50, 350), "test": mixed(1000, 200)}


SUBJECT = SimpleNamespace(like=lambda part: torch.ones(len(part.labels), dtype=torch.bool))


def areas(labels, known):
    original, references = read_by(1, labels, known=3.0), [read_by(seed, labels) for seed in (2, 3)]
    return per_sample_attacks(read_by(4, labels, known), original, references, SUBJECT), original, references


def test_another_mix_of_labels_tells_nothing(labels):
    values, _, references = areas(labels, known=0.0)
    assert 0.5 in values[RMIA]
    # Over all labels together the same scores look as if the network had been driven away from the forget samples.
    parts = []
    for name, rows in (("forget", slice(None)), ("test", slice(0, None, 2)), ("test", slice(1, None, 2))):
        audited, *others = (network[name].signals[rows].sigmoid() for network in (read_by(4, labels), *references))
        parts.append(Probabilities(audited, torch.stack(others)))
    assert rmia_rates(*parts).area.high < 0.4


def test_members_are_found_whatever_the_mix(labels):
    values, *_ = areas(labels, known=3.0)
    assert values[RMIA].low > 0.8 and values[IAM].low > 0.6


def test_labels_that_alternate_in_the_test_data_are_all_asked():
    """Every other sample of 1, 0, 1, 0, ... has one label, and forget samples of the other would be compared with none."""
    labels = {"forget": mixed(200, 200), "test": 1 - torch.arange(1200) % 2}
    reading, references = read_by(4, labels), [read_by(seed, labels) for seed in (2, 3)]
    reading["forget"].signals[labels["forget"] == 1] += 8.0  # samples of this label are known
    values = per_sample_attacks(reading, read_by(1, labels), references, SUBJECT)
    assert values[RMIA].value == pytest.approx(0.75, abs=0.05)


def test_too_few_unseen_samples_are_not_attacked():
    labels = {"forget": mixed(10, 10), "test": mixed(8, 8)}
    assert areas(labels, known=0.0)[0] == {}
