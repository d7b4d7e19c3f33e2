"""What is looked at without waiting for a GPU says of a batch what the whole check would."""

from __future__ import annotations

import pytest
import torch

from expunge.data.objective import Objective
from expunge.fisher.reading import Labels, checked, numbers_of, read_numbers

X, Y = torch.randn(4, 3), torch.tensor([0, 2, 1, 0])


def looked(batch, objective=None):
    return read_numbers(*numbers_of(batch, objective or Objective()))


def test_finite_numbers_and_the_range_of_labels():
    assert looked((X, Y)) == (True, Labels(1, 0, 2))
    assert looked({"x": X, "labels": Y[:, None].expand(4, 2).to(torch.uint8)}) == (True, Labels(2, 0, 2))
    assert looked((X, torch.full((4, 2), -100))) == (True, Labels(2, 0, 0))  # they do not count
    assert looked((X, torch.full((4,), -100))) == (True, Labels(1, -100, -100))  # of whole samples they do


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_looked_at_again(value):
    assert not looked((X.index_fill(0, torch.tensor(2), value), Y))[0]
    assert not looked((X, X.index_fill(0, torch.tensor(2), value)))[0]


def test_targets_that_are_no_labels():
    assert looked((X, X)) == (True, None) and looked((Y, Y > 1)) == (False, None)
    assert looked((X, Y), Objective(targets=lambda batch: batch[1])) == (True, None)
    assert looked({"x": X}) == (True, None)


@pytest.mark.parametrize(
    ("labels", "logits", "inside"),
    [
        (Labels(1, 0, 2), (4, 3), True),
        (Labels(1, 0, 3), (4, 3), False),
        (Labels(1, -1, 2), (4, 3), False),
        (Labels(2, 0, 2), (4, 3), False),
        (Labels(2, 0, 2), (4, 3, 5), True),
        (Labels(0, 0, 0), (4,), False),
    ],
)
def test_labels_inside_the_head(labels, logits, inside):
    assert labels.inside(torch.Size(logits)) == inside


def test_batches_on_the_cpu_are_checked_as_they_come():
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield X + number, Y

    found = checked(batches(), torch.device("cpu"), Objective())
    assert torch.equal(next(found)[0][0], X) and read == [0]
    assert len(list(found)) == 2
