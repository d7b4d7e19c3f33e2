"""Whatever a user holds becomes batches that can be read again, in the order of the data or in one given by a seed."""

from collections import namedtuple

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from expunge.data.batches import Batches, OnDevice, _read_by_all, as_batches, batch_size, joined, row_reader, take
from expunge.errors import InputError
from expunge.fisher import diagonal
from expunge.runtime.nested import combine_tensors, map_tensors, tensors
from tests.methods import cases

x, y = torch.arange(30.0).reshape(10, 3), torch.arange(10)
whole = TensorDataset(x, y)


class Plain(Dataset):
    """Samples one at a time, the label a plain number."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return x[index], int(y[index])


class Doubled(TensorDataset):
    """A tensor dataset with a way of its own to make a sample."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return 2 * inputs, label


class Whole(Dataset):
    """Read a batch at a time, and no other way."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def __len__(self):
        return self.last - self.first

    def batch_of(self, rows):
        return x[self.first : self.last][rows], y[self.first : self.last][rows]


class Shifted(Subset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + 1, label

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x[0], 0)])


def together(batches):
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))


SAME = {
    "tensor dataset": lambda: whole,
    "dataset": Plain,
    "subset": lambda: Subset(whole, range(10)),
    "subset of a dataset": lambda: Subset(Plain(), range(10)),
    "concatenation": lambda: ConcatDataset([TensorDataset(x[:3], y[:3]), Subset(whole, [3, 4]), TensorDataset(x[5:], y[5:])]),
    "concatenation of samples": lambda: ConcatDataset([Subset(Plain(), range(3)), Subset(Plain(), range(3, 10))]),
    "whole batches": lambda: Whole(0, 10),
    "whole batches, a part": lambda: Subset(Whole(0, 10), range(10)),
    "whole batches, concatenated": lambda: ConcatDataset([Whole(0, 6), Whole(6, 10)]),
    "loader": lambda: DataLoader(Plain(), batch_size=4),
    "list of samples": lambda: [Plain()[index] for index in range(10)],
    "tuple of samples": lambda: tuple(whole[index] for index in range(10)),
    "list of batches": lambda: [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])],
    "iterator": lambda: iter([(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]),
    "generator": lambda: ((x[rows], y[rows]) for rows in torch.arange(10).split(4)),
    "batches": lambda: as_batches(whole, batch_size=4),
}


@pytest.mark.parametrize("name", SAME)
def test_every_form_gives_the_same_batches_again_and_again(name):
    batches = as_batches(SAME[name](), batch_size=4)
    for _ in range(2):
        held = list(batches)
        assert [batch_size(batch) for batch in held] == [4, 4, 2] and len(batches) == 3
        inputs, labels = together(held)
        assert torch.equal(inputs, x) and torch.equal(labels, y) and labels.dtype == torch.int64


@pytest.mark.parametrize("name", sorted(set(SAME) - {"loader"}))
def test_a_seed_gives_one_order(name):
    batches = as_batches(SAME[name](), batch_size=4)
    inputs, labels = together(batches.shuffled(3))
    assert torch.equal(labels, together(batches.shuffled(3))[1])
    assert any(not torch.equal(labels, together(batches.shuffled(seed))[1]) for seed in (4, 5, 6))
    assert torch.equal(labels.sort().values, y) and torch.equal(inputs, x[labels])


def test_shuffling_leaves_the_global_random_numbers_alone():
    before = torch.random.get_rng_state()
    list(as_batches(whole).shuffled(0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_loader_keeps_its_own_order_and_collation():
    loader = DataLoader(whole, batch_size=4, collate_fn=lambda samples: {"labels": torch.stack([label for _, label in samples])})
    assert [batch["labels"].tolist() for batch in as_batches(loader).shuffled(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_subsets_of_subsets():
    inner = Subset(whole, [7, 1, 3, 9, 9])
    outer = Subset(inner, numpy.array([4, 0, 2]))
    assert together(as_batches(outer, batch_size=2))[1].tolist() == [9, 7, 3]
    assert together(as_batches(Subset(outer, [-1, 1]), batch_size=2))[1].tolist() == [3, 7]
    assert together(as_batches(Subset(Subset(Plain(), [7, 1, 3]), [2, 0])))[1].tolist() == [3, 7]


def test_subsets_of_tensors_are_not_copied(monkeypatch):
    """Half of the rows, and only a batch of them is ever copied."""
    copied = []
    original = torch.Tensor.__getitem__

    def counted(tensor, index):
        found = original(tensor, index)
        if tensor.data_ptr() == x.data_ptr():
            copied.append(len(found))
        return found

    monkeypatch.setattr(torch.Tensor, "__getitem__", counted)
    batches = as_batches(Subset(Subset(whole, range(8)), range(6)), batch_size=2)
    assert copied == []
    list(batches)
    assert copied == [2, 2, 2]


def test_concatenations_keep_the_order_asked_for():
    laid = ConcatDataset([Whole(0, 6), TensorDataset(x[6:], y[6:])])
    assert together(as_batches(Subset(laid, [9, 0, -1, 7, 5, 5, -10]), batch_size=4))[1].tolist() == [9, 0, 9, 7, 5, 5, 0]
    with pytest.raises(InputError, match="forget: the parts of a concatenation must hold samples of one shape"):
        list(as_batches(ConcatDataset([whole, TensorDataset(x[:, :2], y)]), "forget", batch_size=20))
    with pytest.raises(InputError, match="the parts of a concatenation"):
        list(as_batches(ConcatDataset([whole, TensorDataset(x)]), batch_size=20))


class Named(Dataset):
    """Mappings, read a batch at a time; the order of the keys is the dataset's own."""

    def __init__(self, keys):
        self.keys = keys

    def __len__(self):
        return 10

    def batch_of(self, rows):
        return {key: {"x": x[:, 0], "y": y + 100}[key][rows] for key in self.keys}


def test_mappings_are_concatenated_by_key_not_by_order():
    (batch,) = as_batches(ConcatDataset([Named("xy"), Named("yx")]), batch_size=20)
    assert batch["x"].tolist() == 2 * x[:, 0].tolist() and batch["y"].tolist() == 2 * (y + 100).tolist()
    with pytest.raises(InputError, match="the parts of a concatenation .* found keys x and others"):
        list(as_batches(ConcatDataset([Named("x"), Named("xy")]), batch_size=20))


def test_batches_are_joined_place_by_place():
    Pair = namedtuple("Pair", "inputs labels")
    first, second = ({"x": [torch.ones(size, 2)], "y": Pair(torch.zeros(size), 0), "name": "a"} for size in (2, 3))
    found = joined([first, dict(reversed(second.items()))], "forget", "one form")
    assert found["x"][0].shape == (5, 2) and found["y"].inputs.shape == (5,) and found["y"].labels == 0 and found["name"] == "a"
    assert combine_tensors([(x, 1), (2 * x, 1)], lambda parts: parts[1] - parts[0])[0].equal(x)
    for other in ((x,), (x, 3), [y, 1.0]):
        with pytest.raises(InputError, match="^forget: one form"):
            joined([(x, y), other], "forget", "one form")


def test_subclasses_with_their_own_samples_are_asked_for_them():
    assert torch.equal(together(as_batches(Doubled(x, y)))[0], 2 * x)
    assert torch.equal(together(as_batches(Subset(Doubled(x, y), [3])))[0], 2 * x[3:4])
    assert torch.equal(together(as_batches(Shifted(whole, [3, 5])))[0], x[[3, 5]] + 1)


def test_mappings():
    samples = [{"pixels": x[index], "label": index, "name": f"image {index}"} for index in range(10)]
    first = next(iter(as_batches(samples, batch_size=4)))
    assert torch.equal(first["pixels"], x[:4]) and first["label"].tolist() == [0, 1, 2, 3] and first["name"][1] == "image 1"
    held = [{"pixels": x, "labels": y, "names": ["a"] * 10}]
    assert next(iter(as_batches(held))) is held[0]
    nested = [({"pixels": x}, y)]
    assert next(iter(as_batches(nested))) is nested[0]


def test_parts_of_a_batch():
    Pair = namedtuple("Pair", "inputs labels")
    batch = {"pair": Pair(x, [y, "name"]), "rest": (x,), "none": None}
    assert len(tensors(batch)) == 3 and batch_size(batch) == 10
    cut = take(batch, slice(2, 4))
    assert isinstance(cut["pair"], Pair) and cut["pair"].labels[0].tolist() == [2, 3] and cut["pair"].labels[1] == "name"
    assert torch.equal(map_tensors(x, lambda tensor: -tensor), -x)


BAD = {
    "nothing": (lambda: None, "must be a dataset, a data loader or an iterable of batches; found NoneType"),
    "a number": (lambda: 3, "must be a dataset"),
    "a string": (lambda: "data", "must be a dataset"),
    "a mapping": (lambda: {"x": x, "y": y}, "must be a dataset"),
    "an empty list": (lambda: [], "must not be empty"),
    "an empty iterator": (lambda: iter([]), "must not be empty"),
    "an empty subset": (lambda: Subset(whole, []), "must not be empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    build, message = BAD[name]
    with pytest.raises(InputError, match=f"forget: {message}"):
        as_batches(build(), "forget")


UNREADABLE = {
    "objects": [(object(), 1), (object(), 2)],
    "shapes that differ": [(torch.zeros(2), 1), (torch.zeros(3), 2)],
    "missing values": [(None, 1), (None, 2)],
    "words that are not padded": [{"words": [1, 2], "label": 0}, {"words": [1, 2, 3], "label": 1}],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_samples_that_cannot_be_put_together(name):
    with pytest.raises(InputError, match="forget: samples must be tensors or numbers of one shape, or give a DataLoader with a collate_fn"):
        list(as_batches(UNREADABLE[name], "forget"))
    for workers in (0, 1):
        with pytest.raises(InputError, match="forget: samples must be tensors or numbers of one shape, or a loader needs a collate_fn"):
            list(as_batches(DataLoader(UNREADABLE[name], 2, num_workers=workers), "forget"))


def test_batches_of_arrays_are_refused_as_such():
    images, labels = cases.dataset()[:8]
    with pytest.raises(InputError, match="batches: inputs and targets must be tensors; found ndarray"):
        diagonal(cases.model(), [(images.numpy(), labels)])
    with pytest.raises(InputError, match="batches: inputs and targets must be tensors; found ndarray"):
        diagonal(cases.model(), [{"input": images, "labels": labels.numpy()}])


@pytest.mark.parametrize(
    "batch, message",
    [((x, y[:3]), "share a first dimension"), ((x[:0], y[:0]), "at least 1"), ((x, torch.tensor(1)), "at least 1"), ({}, "hold")],
)
def test_sizes_that_do_not_fit(batch, message):
    with pytest.raises(InputError, match=message):
        batch_size(batch)


def test_batches_have_a_length():
    assert len(Batches(lambda seed: iter([x]), 1)) == 1


WITH_ROWS = ["tensor dataset", "subset", "concatenation", "whole batches", "whole batches, a part", "whole batches, concatenated"]


@pytest.mark.parametrize("name", SAME)
def test_rows_are_the_batches_in_the_same_order(name):
    batches = as_batches(SAME[name](), batch_size=4)
    assert (batches.rows is not None) == (name in [*WITH_ROWS, "batches"])
    if batches.rows is not None:
        by_rows = [batches.rows.read(rows) for rows in batches.rows.shuffled(3, torch.device("cpu"))]
        for one, other in zip(by_rows, batches.shuffled(3), strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("cuts", [(3, 10), (1, 2, 9, 10), (10,)])
def test_reading_by_all_parts_is_reading_each_by_its_own(cuts):
    starts = [0, *cuts[:-1]]
    parts = [TensorDataset(x[start:end], y[start:end]) for start, end in zip(starts, cuts, strict=True)]
    for rows in (torch.arange(10), torch.tensor([9, 0, 5, 2, 2, 8])):
        inputs, labels = _read_by_all([row_reader(part) for part in parts], list(cuts), rows)
        assert torch.equal(inputs, x[rows]) and torch.equal(labels, y[rows])


def test_parts_of_another_shape_are_not_mixed():
    readers = [row_reader(TensorDataset(x)), row_reader(TensorDataset(x[:, :1]))]
    with pytest.raises(ValueError, match=r"\(3,\) and \(1,\)"):  # torch.where would spread the one value over three
        _read_by_all(readers, [10, 20], torch.arange(4))


def test_a_subset_may_count_from_the_end():
    held = ConcatDataset([TensorDataset(x[:3], y[:3]), TensorDataset(x[3:], y[3:])])
    assert next(iter(as_batches(Subset(held, [-1, 0, -10]))))[1].tolist() == [9, 0, 0]


def test_a_table_is_moved_once():
    table = OnDevice(torch.arange(4))
    assert table.at(torch.tensor([1])) is table.at(torch.tensor([2]))
    elsewhere = torch.zeros(1, dtype=torch.int64, device="meta")
    assert table.at(elsewhere).device.type == "meta" and table.at(elsewhere) is table.at(elsewhere)
