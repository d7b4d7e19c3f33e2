"""Indices are rows, or a mask with an entry for every sample; whatever else is refused, wherever they are taken."""

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, StackDataset, Subset, SubsetRandomSampler, TensorDataset

import expunge
from expunge import FisherMask, InputError, curvature, fisher, metrics, unlearn
from expunge.data.batches import as_batches
from expunge.data.digest import data_digest
from expunge.data.indices import resolved, rows_of
from expunge.metrics import Relearning, relearn_time
from expunge.model import activations, channels
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.vision.scenarios import category, labels_of, mislabelled, poisoned, subset
from expunge.vision.scenarios.altered import Altered
from tests.methods import cases

x, y = torch.arange(30.0).reshape(10, 3), torch.arange(10)
whole = TensorDataset(x, y)
MASK = y % 3 == 0
ROWS = [0, 3, 6, 9]


class Plain(Dataset):
    """Samples one at a time out of a list, which takes True for row 1."""

    samples = [(x[index], index) for index in range(10)]

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.samples[index]


class Negated(Subset):
    """A subset with a way of its own to make a sample."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return -inputs, label

    def __getitems__(self, indices):
        return [self[index] for index in indices]


MASKS = {
    "tensor": MASK,
    "list": MASK.tolist(),
    "tuple": tuple(MASK.tolist()),
    "array": MASK.numpy(),
    "array of objects": MASK.numpy().astype(object),
    "numpy's truth values": list(MASK.numpy()),
    "tensors of truth values": list(MASK),
}
KINDS = {
    "list": ROWS,
    "range": range(0, 10, 3),
    "int64": torch.tensor(ROWS),
    "int8": torch.tensor(ROWS, dtype=torch.int8),
    "uint8": torch.tensor(ROWS, dtype=torch.uint8),
    "uint16": torch.tensor(ROWS, dtype=torch.uint16),
    "array": numpy.array(ROWS, dtype=numpy.uint64),
    "big-endian array": numpy.array(ROWS, dtype=">i4"),
    "numpy's numbers": [numpy.int16(row) for row in ROWS],
    "tensors": [torch.tensor(row) for row in ROWS],
    "objects": numpy.array(ROWS, dtype=object),
    "from the end": [-10, -7, -4, -1],
}


@pytest.mark.parametrize("name", [*(f"mask, {name}" for name in MASKS), *KINDS])
def test_masks_and_whole_numbers_name_rows(name):
    indices = MASKS[name.removeprefix("mask, ")] if name.startswith("mask") else KINDS[name]
    for dataset in (whole, Plain()):
        assert [batch[1].tolist() for batch in as_batches(Subset(dataset, indices), batch_size=3)] == [[0, 3, 6], [9]]
    assert data_digest(Subset(whole, indices)) == data_digest(Subset(whole, ROWS))
    assert torch.equal(labels_of(Subset(whole, indices)), torch.tensor(ROWS))


BAD = {
    "floats": [1.9, 2.9],
    "whole floats": [1.0, 2.0],
    "a tensor of floats": torch.tensor([1.0]),
    "an array of floats": numpy.array([1.0]),
    "nan": [float("nan")],
    "complex numbers": torch.tensor([1j]),
    "words": ["1", "2"],
    "a word": "12",
    "bytes": b"\x01",
    "a mapping": {1: 2},
    "nothing": [None, 1],
    "a number": 3,
    "None": None,
    "two dimensions": torch.tensor([[0, 1]]),
    "two dimensions in a list": [[0, 1]],
    "brackets": [torch.tensor([1])],
    "no dimension": torch.tensor(3),
    "outside": [0, 10],
    "before": [-11],
    "beyond int64": [2**70],
    "beyond int64, array": numpy.array([2**63 + 1], dtype=numpy.uint64),
    "a long range": range(10**15),
    "a short mask": [True, False],
    "a long mask": torch.ones(11, dtype=torch.bool),
    "a mask of two dimensions": torch.ones(10, 1, dtype=torch.bool),
    "mask and rows": [True, 2],
    "rows and numpy's truth": [1, numpy.True_],
    "a mask of numbers": MASK.long(),
    "a mask of bytes": MASK.to(torch.uint8),
    "a mask of numbers in a list": MASK.int().tolist(),
    "dates": numpy.array(["2020-01-01"], dtype="datetime64[D]"),
    "missing rows": numpy.ma.array([1, 2], mask=[True, False]),
    "a sparse tensor": torch.tensor([0, 1]).to_sparse(),
}


@pytest.mark.parametrize("name", BAD)
def test_other_indices_are_refused_by_name(name):
    with pytest.raises(InputError, match="^rows: "):
        rows_of(BAD[name], 10, "rows")
    for dataset in (whole, Plain()):
        if name not in ("a number", "None", "no dimension"):  # torch's Subset has no length with these
            with pytest.raises(InputError, match="^forget: a Subset's indices must be"):
                as_batches(Subset(dataset, BAD[name]), "forget")
    with pytest.raises(InputError, match="^indices: "):
        subset(whole, BAD[name])


def test_an_empty_range_and_rows_without_a_length():
    assert rows_of(range(5, 0), 10, "rows").tolist() == rows_of([], 10, "rows").tolist() == []
    assert rows_of([3, 100], None, "rows").tolist() == [3, 100]
    assert rows_of(torch.tensor([0, 1]), 2, "rows").tolist() == [0, 1]
    with pytest.raises(InputError, match="a boolean mask of a dataset with a length; found a mask of 1"):
        rows_of([True], None, "rows")


def labels(data) -> list[int]:
    return torch.cat([batch[1] for batch in as_batches(data, batch_size=3)]).tolist()


def test_masks_are_seen_through_subsets_concatenations_and_views():
    few = Subset(whole, MASK)
    assert labels(Subset(few, [True, False, False, True])) == labels(Subset(few, [0, -1])) == [0, 9]
    laid = ConcatDataset([Subset(Plain(), MASK.numpy()), Plain(), Subset(Plain(), MASK)])
    assert labels(laid) == [*ROWS, *range(10), *ROWS]
    assert labels(Subset(laid, torch.arange(18) > 13)) == ROWS
    assert labels(Altered(few, torch.tensor([5, 5, 5, 5]))) == [5, 5, 5, 5]
    inputs, _ = next(iter(as_batches(Negated(whole, MASK.tolist()))))
    assert torch.equal(inputs, -x[ROWS])
    assert resolved(laid, "data") is not laid and resolved(whole, "data") is whole
    plain = Subset(whole, ROWS)
    assert resolved(plain, "data") is plain and list(few.indices) == MASK.tolist()


def test_everything_that_takes_data_takes_masks():
    data, model = cases.dataset(), cases.model().eval()
    mask = data.tensors[1] == 0
    rows = mask.nonzero().flatten().tolist()
    one, other = Subset(data, mask.numpy()), Subset(data, rows)
    assert metrics.accuracy(model, one) == metrics.accuracy(model, other)
    assert torch.equal(metrics.logits(model, one).logits, metrics.logits(model, other).logits)
    assert fisher.diagonal(model, one).count == curvature.gradient(model, one)[1] == len(rows)
    layers = channels.find(model, data[:2])
    assert activations.measure(model, one, layers).counts.tolist() == [len(rows)]
    assert activations.labels(one, "data") == [0]
    found = [unlearn(model, Subset(data, chosen), Subset(data, ~mask), FisherMask(tuning=cases.QUICK)) for chosen in (mask, rows)]
    assert found[0].history[-1].accuracies == found[1].history[-1].accuracies
    trained = [cases.model(), cases.model()]
    for network, part in zip(trained, (one, other), strict=True):
        expunge.train(network, part, cases.QUICK)
    assert torch.equal(trained[0][-1].weight, trained[1][-1].weight)
    again = Relearning(Tuning(Constant(0.01, 1)), draws=8)
    assert relearn_time(model, model, one, one, again).losses == relearn_time(model, model, other, other, again).losses


@pytest.mark.parametrize("make", [lambda data: category(data, 1), lambda data: mislabelled(data, 0.5), lambda data: subset(data, [1, 2])])
def test_scenarios_of_masked_data(make):
    data = TensorDataset(torch.randn(12, 1, 4, 4), torch.arange(12) % 3)
    mask = torch.arange(12) < 9
    for one, other in zip(make(Subset(data, mask)), make(Subset(data, range(9))), strict=True):
        assert labels(one) == labels(other) and one.indices == other.indices
        assert [batch[1].tolist() for batch in DataLoader(one, 20)] == [labels(one)]  # torch's loader reads it as well


def test_a_mask_names_the_samples_of_a_scenario():
    data = TensorDataset(torch.randn(12, 1, 4, 4), torch.arange(12) % 3)
    chosen = data.tensors[1] == 1
    for mask in (chosen, chosen.tolist(), chosen.numpy()):
        assert subset(data, mask).forget.indices == [1, 4, 7, 10]
    attacked = poisoned(Subset(data, data.tensors[1] != 2), 2, 1, test=Subset(data, data.tensors[1] != 2))
    assert len(attacked.train) == 10 and len(attacked.tests["attack"]) == 4


class Wrapped(Dataset):
    """Reads what it holds in torch's way."""

    def __init__(self, *inner) -> None:
        self.inner = inner

    def __len__(self):
        return len(self.inner[-1])

    def __getitem__(self, index):
        return self.inner[0][index]


WRAPPED = {
    "a dataset of one's own": lambda inner: Wrapped(inner),
    "one of several": lambda inner: Wrapped(whole, inner),
    "two deep": lambda inner: Wrapped(Wrapped(inner)),
    "below a subset": lambda inner: Subset(Wrapped(inner), [0, 1]),
    "columns side by side": lambda inner: StackDataset(inner, inner),
    "columns by name": lambda inner: StackDataset(x=inner, labels=inner),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("mask", [MASK, MASK.tolist()])
def test_masks_that_only_torch_would_read_are_refused(name, mask):
    data, good = (WRAPPED[name](Subset(Plain(), indices)) for indices in (mask, ROWS))
    as_batches(good, "data")
    for held in (data, DataLoader(data, 2)):
        with pytest.raises(InputError, match="^data: a Subset's indices must be whole numbers; give mask.nonzero"):
            as_batches(held, "data")
    looped = Wrapped(whole)
    looped.inner = (looped, whole)
    as_batches(looped, "data")


LOADERS = {
    "a mask": lambda indices: DataLoader(Subset(Plain(), indices), 4),
    "a mask below": lambda indices: DataLoader(ConcatDataset([Plain(), Subset(Plain(), indices)]), 4),
    "a sampler": lambda indices: DataLoader(Plain(), 4, sampler=SubsetRandomSampler(indices)),
    "a list as sampler": lambda indices: DataLoader(Plain(), 4, sampler=list(indices)),
    "a batch sampler": lambda indices: DataLoader(Plain(), batch_sampler=BatchSampler(SubsetRandomSampler(indices), 4, False)),
    "batches of rows": lambda indices: DataLoader(Plain(), batch_sampler=[list(indices)[:1], list(indices)[1:]]),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(
    "indices", [MASK, MASK.tolist(), MASK.numpy(), [1.9, 2.9], [0, 10]], ids=["tensor", "list", "array", "floats", "10"]
)
def test_loaders_read_rows_alone(name, indices):
    """Torch reads some datasets at True and False as at rows 1 and 0."""
    with pytest.raises(InputError, match="^data: a (Subset|sampler)'s indices must be (whole numbers|rows)"):
        metrics.accuracy(cases.model(), LOADERS[name](indices))
    assert sorted(labels(LOADERS[name](ROWS)))[-4:] == (ROWS if name != "a mask below" else [7, 8, 9, 9])
