"""What tells data from others, and what does not."""

import hashlib

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from expunge.data import digest as contents
from expunge.data.digest import add_batch, data_digest
from expunge.vision.augmentation import Augmentation
from expunge.vision.datasets import Images
from expunge.vision.scenarios.altered import Altered
from expunge.vision.zoo import Augmented

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 4
PIXELS = torch.arange(12 * 3 * 16, dtype=torch.int64).remainder(251).to(torch.uint8).view(12, 3, 4, 4)


def images(pixels=PIXELS, labels=Y) -> Images:
    return Images(pixels, labels)


class Labelled(Dataset):
    """As torchvision's: labels in `targets`, samples that chance has a part in."""

    def __init__(self, targets) -> None:
        self.targets = targets

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(3), self.targets[index]


def changed(tensor: torch.Tensor, row: int) -> torch.Tensor:
    other = tensor.clone()
    other[row].view(-1)[0] += 1
    return other


MADE = {  # from inputs (or pixels) and labels
    "tensors": lambda x, y: TensorDataset(x, y),
    "subset": lambda x, y: Subset(TensorDataset(x, y), [11, 7, 2, -9, 0]),
    "subset of a subset": lambda x, y: Subset(Subset(TensorDataset(x, y), range(1, 12)), torch.tensor([6, 1, -1])),
    "concatenation": lambda x, y: ConcatDataset([TensorDataset(x, y), Subset(TensorDataset(x, y), [7])]),
    "subset of a concatenation": lambda x, y: Subset(ConcatDataset([TensorDataset(x, y), TensorDataset(x[:4], y[:4])]), [14, 7, -1, 2]),
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), 4, shuffle=True),
}


@pytest.mark.parametrize("name", MADE)
def test_every_value_of_the_rows_counts(name):
    make = MADE[name]
    first = data_digest(make(X, Y))
    assert first is not None and first == data_digest(make(X.clone(), Y.clone()))
    assert len({first, data_digest(make(changed(X, 7), Y)), data_digest(make(X, changed(Y, 7))), data_digest(make(X.double(), Y))}) == 4


@pytest.mark.parametrize("make", [images, lambda *held: Augmented(images(*held), Augmentation(1))])
def test_pixels_and_labels_of_images_count(make):
    assert len({data_digest(make()), data_digest(make(changed(PIXELS, 3))), data_digest(make(PIXELS, changed(Y, 3)))}) == 3
    assert data_digest(make()) == data_digest(make())


def test_the_order_of_the_rows_counts():
    held = TensorDataset(X, Y)
    assert len({data_digest(Subset(held, rows)) for rows in ([0, 1, 2], [1, 0, 2], [0, 1], [0, 1, 2, 2])}) == 4
    both = ConcatDataset([held, TensorDataset(X + 1, Y)])
    assert data_digest(Subset(both, [0, 12, 1])) != data_digest(Subset(both, [0, 1, 12]))


def test_rows_that_a_subset_leaves_out_do_not_count():
    rows = [4, 1, 9]
    first = data_digest(Subset(TensorDataset(X, Y), rows))
    assert first == data_digest(Subset(TensorDataset(changed(X, 3), changed(Y, 3)), rows)) == data_digest(TensorDataset(X[rows], Y[rows]))


def test_how_a_tensor_lies_in_memory_and_how_much_is_read_at_once_do_not_count(monkeypatch):
    first = data_digest(TensorDataset(X, Y))
    monkeypatch.setattr(contents, "CHUNK", 60)  # five rows of three numbers
    assert first == data_digest(TensorDataset(X.t().contiguous().t(), Y)) == data_digest(TensorDataset(X.clone().requires_grad_(), Y))


def test_what_is_copied_at_once_does_not_grow_with_the_rows(monkeypatch):
    sizes = []
    monkeypatch.setattr(contents, "add_bytes", lambda digest, tensor: sizes.append(tensor.nbytes))
    monkeypatch.setattr(contents, "CHUNK", 16_000)
    data_digest(TensorDataset(torch.zeros(10, 1000), torch.zeros(10, 9000)))
    assert sizes == [16_000, 16_000, 8_000] + [36_000] * 10  # a row is the least


@pytest.mark.parametrize("form", [list, numpy.array, torch.tensor])
def test_of_other_datasets_the_labels_count(form):
    make = [lambda y: Labelled(form(y.tolist())), lambda y: Altered(Labelled([0] * 12), y)]
    for each in make:
        assert data_digest(each(Y)) == data_digest(each(Y)) != data_digest(each(changed(Y, 3)))
        assert data_digest(Subset(each(Y), [3])) != data_digest(Subset(each(changed(Y, 3)), [3]))


class Endless(IterableDataset):
    def __iter__(self):
        yield from X


class Unlabelled(Labelled):
    @property
    def targets(self):
        raise FileNotFoundError("labels.txt")

    @targets.setter
    def targets(self, targets):
        pass


@pytest.mark.parametrize(
    "data",
    [
        None,
        [(X, Y)],
        list(zip(X, Y.tolist(), strict=True)),
        Labelled([f"{label}" for label in Y.tolist()]),
        Labelled([{"boxes": X}] * 12),
        Labelled(Y[:5]),  # not one for each sample
        Labelled(None),
        Unlabelled(None),
        TensorDataset(X.to_sparse()),
        DataLoader(Endless(), 4),
        Subset(TensorDataset(X, Y), ["a", "b"]),
        Subset(TensorDataset(X, Y), [0, 12]),  # refused when it is read
        Subset(Endless(), [0, 1]),
    ],
)
def test_data_that_do_not_tell_are_left_alone(data):
    before = torch.get_rng_state()
    assert data_digest(data) is None and torch.equal(torch.get_rng_state(), before)


def test_all_that_a_batch_holds_counts():
    values = torch.arange(4.0)
    batches = [
        values,
        values.double(),
        values[None],
        (values,),
        (values, values),
        [values, [1, 2]],
        [values, [12]],
        [values, ["1", 2]],
        {"a": values, "b": 1},
        {"a": values, "b": 1.0},
        {"b": values, "a": 1},
        {"a": values, "b": None},
        {"a": values, "b": numpy.arange(3)},
        {"a": values, "b": numpy.arange(3) + 1},
    ]
    assert len({of_batch(batch) for batch in batches}) == len(batches)
    assert of_batch({"a": values, "b": 1}) == of_batch({"b": 1, "a": values.clone()})  # they are passed by name


def of_batch(batch) -> str:
    digest = hashlib.sha256()
    add_batch(digest, batch)
    return digest.hexdigest()
