"""Samples held apart: none twice, none lost, of every label one kept, in whatever form the data are."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from expunge.data.batches import as_batches
from expunge.data.parting import cuttable, drawn_apart, first_batches

DATA = TensorDataset(torch.arange(50.0).reshape(50, 1), torch.arange(50) % 5)
TWENTY = list(range(10, 30))

FORMS = {
    "dataset": lambda: Subset(DATA, TWENTY),
    "list of batches": lambda: [*DataLoader(Subset(DATA, TWENTY), batch_size=6)],
    "batches": lambda: as_batches(DataLoader(Subset(DATA, TWENTY), batch_size=7).__iter__(), "data"),
    "loader": lambda: DataLoader(Subset(DATA, TWENTY), batch_size=6),
    "loader that shuffles": lambda: DataLoader(Subset(DATA, TWENTY), batch_size=6, shuffle=True),
    "loader with a sampler": lambda: DataLoader(DATA, batch_size=6, sampler=SubsetRandomSampler(TWENTY)),
    "list of samples": lambda: [DATA[row] for row in TWENTY],
}


def values(data) -> list[int]:
    return [int(value) for batch in as_batches(data, "data", 4) for value in batch[0].flatten()]


@pytest.mark.parametrize("form", FORMS)
def test_any_form_is_cut(form):
    parts = cuttable(FORMS[form](), "data", 4)
    held, kept = torch.tensor([0, 6, 7, 19]), torch.tensor([number for number in range(20) if number not in (0, 6, 7, 19)])
    assert parts.samples == 20
    assert values(parts.at(held, True)) == [10, 16, 17, 29]
    assert sorted(values(parts.at(kept, False))) == sorted({*TWENTY} - {10, 16, 17, 29})


def test_a_loader_that_drops_its_last_batch_does_so_in_training_alone():
    parts = cuttable(DataLoader(Subset(DATA, range(18)), batch_size=6, drop_last=True, shuffle=True), "data", 4)
    some = torch.arange(8)
    assert len(values(parts.at(some, False))) == 6 and values(parts.at(some, True)) == [*range(8)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(Stream(), batch_size=5),
        DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
        DataLoader(DATA, batch_size=5, sampler=WeightedRandomSampler(torch.ones(50), 50)),
        DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, replacement=True)),
        [{"inputs": torch.zeros(3, 2), "labels": torch.zeros(2)}],
    ],
    ids=["stream", "batch sampler", "weights", "replacement", "batches of no size"],
)
def test_others_are_left_whole(data):
    assert cuttable(data, "data", 4) is None


def test_every_label_keeps_a_sample_and_none_is_lost():
    labels = torch.tensor([0] * 60 + [1] * 39 + [2])
    kept, held = drawn_apart(labels, 0.5, 1000, seed=3)
    assert len(held) == 50 and sorted([*kept.tolist(), *held.tolist()]) == [*range(100)]
    assert {*labels[kept].tolist()} == {0, 1, 2}
    assert torch.equal(held, drawn_apart(labels, 0.5, 1000, seed=3)[1]) and not torch.equal(held, drawn_apart(labels, 0.5, 1000, seed=4)[1])
    assert len(drawn_apart(labels, 0.5, 7, seed=3)[1]) == 7 and len(drawn_apart(100, 0.1, 50, seed=3)[1]) == 10
    assert len(drawn_apart(torch.arange(10), 0.9, 50, seed=3)[1]) == 0  # a sample of each label, and no more


def test_no_more_batches_than_asked_for():
    part = first_batches(DATA, "data", 4, 3)
    assert len(part) == 3 and values(part) == [*range(12)]
    shuffled = [int(value) for batch in part.shuffled(1) for value in batch[0]]
    assert len(shuffled) == 12 and shuffled != [*range(12)]
    assert len(first_batches(DATA, "data", 20, 9)) == 3
