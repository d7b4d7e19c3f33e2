"""Samples that are both to forget and to keep are seen however the data are held; others are let through, and doubts are told."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from expunge import Finetune, GradientAscent, InputError, Objective, UncheckedWarning, unlearn
from expunge.data import fingerprints
from expunge.data.overlap import check_disjoint
from expunge.vision.augmentation import Augmentation
from expunge.vision.datasets import Images
from expunge.vision.scenarios import mislabelled, poisoned
from expunge.vision.scenarios.altered import Altered
from expunge.vision.zoo import Augmented
from tests.methods import cases

x, y = torch.randn(100, 6, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 4
whole = TensorDataset(x, y)
same = TensorDataset(torch.ones(20, 6), torch.ones(20, dtype=torch.int64))  # every sample has many twins
pixels = torch.randint(0, 256, (100, 1, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
images = Images(pixels, y)


class Own(Dataset):
    """Some rows, in a way that nobody can see through."""

    def __init__(self, rows, change=None) -> None:
        self.rows, self.change = list(rows), change

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return x[row] if self.change is None else self.change(x[row]), int(y[row])


class View(Dataset):
    """Changes the inputs, as a dataset with transforms does."""

    def __init__(self, inner, change) -> None:
        self.inner, self.change = inner, change

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        inputs, label = self.inner[index]
        return self.change(inputs), label


class Turned(View):
    """Gives the rows in another order."""

    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)


class Reordered(View):
    """Other rows than those asked for, all of one label: labels do not tell."""

    def __getitem__(self, index):
        return self.inner[len(self) - 1 - index][0], 0


class Mixed(View):
    """A little of another row, drawn by chance, in every sample."""

    def __getitem__(self, index):
        other = self.inner[int(torch.randint(len(self), ()))][0]
        return 0.9 * self.inner[index][0] + 0.1 * other, self.inner[index][1]


class Favoured(View):
    """Labels as probabilities."""

    def __getitem__(self, index):
        inputs, label = self.inner[index]
        return inputs, torch.nn.functional.one_hot(label, 4).float()


class Shifted(Subset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + 1, label

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return noise(inputs), label


class Downloaded(Dataset):
    """As torchvision's: records in `data`, labels in `targets`, transforms."""

    def __init__(self, rows, transform) -> None:
        self.data, self.targets, self.transform = x[rows].numpy().copy(), y[rows].tolist(), transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(torch.as_tensor(self.data[index])), self.targets[index]


class Files(Dataset):
    """As torchvision's folders."""

    def __init__(self, rows, transform) -> None:
        self.samples, self.transform = [(f"./pictures/{row}.png", int(y[row])) for row in rows], transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(x[int(path.split("/")[-1][:-4])]), label


class Stream(IterableDataset):
    def __init__(self, rows, change=None) -> None:
        self.own = Own(rows, change)

    def __iter__(self):
        return (self.own[index] for index in range(len(self.own)))


class Every(Sampler):
    """A sampler of one's own."""

    def __init__(self, rows, random=False) -> None:
        self.rows, self.random = rows, random

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        while True:  # without end: the length says where
            yield from (torch.randint(100, (len(self.rows),)).tolist() if self.random else self.rows)


def noise(inputs):
    return inputs + torch.randn(inputs.shape)


def twice(inputs):
    return 2 * inputs


def copied(rows) -> TensorDataset:
    return TensorDataset(x[rows].clone(), y[rows].clone())


def batches(rows):
    return [(x[part], y[part]) for part in torch.as_tensor(list(rows)).split(7)]


def named(rows):
    return [{"labels": y[part], "input": x[part], "source": "web"} for part in torch.as_tensor(list(rows)).split(9)]


def loader(rows, **settings):
    return DataLoader(whole, 8, sampler=SubsetRandomSampler(list(rows)), **settings)


def collated(samples):
    return {"input": torch.stack([inputs for inputs, _ in samples]), "labels": torch.tensor([int(label) for _, label in samples])}


# Each holds some rows of `whole`, given as a range, and is compared with every other.
FORMS = {
    "subset": lambda rows: Subset(whole, list(rows)),
    "mask": lambda rows: Subset(whole, torch.isin(torch.arange(100), torch.tensor(list(rows)))),
    "slices in memory": lambda rows: TensorDataset(x[rows.start : rows.stop], y[rows.start : rows.stop]),
    "arrays in memory": lambda rows: TensorDataset(torch.from_numpy(x.numpy()[rows.start : rows.stop]), y[rows.start : rows.stop].clone()),
    "copies": copied,
    "in double precision": lambda rows: TensorDataset(x[rows].double(), y[rows].int()),
    "concatenation": lambda rows: ConcatDataset([Subset(whole, rows[:10]), copied(rows[10:])]),
    "part of a concatenation": lambda rows: Subset(ConcatDataset([copied(range(50)), Subset(whole, range(50, 100))]), rows),
    "loader": lambda rows: DataLoader(Subset(whole, rows), 8, shuffle=True),
    "loader with a sampler": loader,
    "loader with a list": lambda rows: DataLoader(whole, 8, sampler=list(rows)),
    "loader with a batch sampler": lambda rows: DataLoader(whole, batch_sampler=BatchSampler(SubsetRandomSampler(rows), 4, False)),
    "loader with batches": lambda rows: DataLoader(whole, batch_sampler=[list(rows[:5]), list(rows[5:])]),
    "loader with weights": lambda rows: DataLoader(whole, 8, sampler=WeightedRandomSampler([float(row in rows) for row in range(100)], 30)),
    "loader with a sampler of one's own": lambda rows: DataLoader(whole, 8, sampler=Every(list(rows))),
    "loader with a collation": lambda rows: DataLoader(Own(rows), 8, collate_fn=collated),
    "loader without collation": lambda rows: DataLoader(Stored(rows), batch_size=None),
    "list of batches": batches,
    "mappings": named,
    "list of samples": lambda rows: [whole[row] for row in rows],
    "own": Own,
    "view": lambda rows: View(Subset(whole, rows), torch.clone),
    "stream": lambda rows: DataLoader(Stream(rows), 8),
    "iterator": lambda rows: iter(batches(rows)),
}


class Stored(Dataset):
    """Hands out batches."""

    def __init__(self, rows) -> None:
        self.batches = batches(rows)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_shared_samples_are_seen_in_every_form_and_others_let_through(first, second):
    state = torch.get_rng_state()
    check_disjoint(FORMS[first](range(20, 35)), FORMS[second](range(35, 80)))
    with pytest.raises(
        InputError, match="^remain: must not hold samples of the forget set; .*found 5 (shared|equal), (the first )?at index"
    ):
        check_disjoint(FORMS[first](range(20, 35)), FORMS[second](range(30, 80)))
    assert torch.equal(torch.get_rng_state(), state)


one_label = TensorDataset(x, y * 0)
favoured = torch.nn.functional.one_hot(y, 4).float()
tokens = torch.arange(48).view(8, 6)
batches_of_ten = TensorDataset(x.view(10, 10, 6), y.view(10, 10))

SHARED = {
    "other rows of one label": (Subset(Reordered(one_label, None), range(10)), Subset(one_label, range(80, 95)), "5 equal"),
    "probabilities in a view": (Subset(whole, range(5)), Favoured(whole, None), "5 shared"),
    "probabilities in memory": (Subset(whole, range(5)), TensorDataset(x, favoured), "5 shared"),
    "probabilities in copies": (Subset(whole, range(5)), TensorDataset(x.clone(), favoured), "5 equal"),
    "entries of one set alone": ([{"x": x[:5], "y": y[:5], "id": y[:5]}], [{"x": x, "y": y}], "5 equal"),
    "zeros below zero": (TensorDataset(x[:2] * 0, y[:2]), TensorDataset(-x.abs() * 0, y), "50 equal"),
    "whole tensors": ((x[:5], y[:5]), (x, y), "5 shared, the first at index 0"),
    "arrays": ((x[:5].numpy(), y[:5].numpy()), (x.numpy(), y.numpy()), "5 shared, the first at index 0"),
    "a dataset of batches": (Subset(whole, range(20, 25)), DataLoader(batches_of_ten, None), "5 equal, at index 20, 21, 22, 23, 24$"),
    "a list of batches in a loader": (Own(range(95, 99)), DataLoader([(x[:50], y[:50]), (x[50:], y[50:])], None), "4 equal, at index 95"),
    "rows from the first": (Subset(whole, [9, 10]), DataLoader(whole, 4, sampler=RandomSampler(range(10))), "1 shared"),
    "texts of other lengths": (
        (tokens, y[:8]),
        ConcatDataset([TensorDataset(tokens[:, :4], y[:8]), TensorDataset(tokens[2:].clone(), y[2:8])]),
        "6 equal, at index 8, 9",
    ),
    "one label changed of memory": (TensorDataset(x[:3], torch.tensor([0, 1, 0])), whole, "2 shared, the first at index 0"),
    "tensors that are reversed": (TensorDataset(x[::2], y[::2]), TensorDataset(x[50:], y[50:]), "25 shared"),
    "a transform": (Subset(whole, [3, 4]), View(whole, twice), "2 shared, the first at index 3"),
    "chance in a view": (View(Subset(whole, range(10)), noise), View(Subset(whole, range(5, 50)), noise), "5 shared, the first at index 5"),
    "chance in memory": (Noisy(x[:10], y[:10]), Noisy(x, y), "10 shared"),
    "chance in copies": (Noisy(x[:10].clone(), y[:10]), Noisy(x.clone(), y), "10 equal, at index 0, 1, 2, 3, 4, ..."),
    "a subset that alters its samples": (Shifted(whole, [3, 5]), Subset(whole, [5, 6]), "1 shared, the first at index 5"),
    "a dataset laid out twice": (Subset(ConcatDataset([whole, whole]), [3]), Subset(ConcatDataset([whole, whole]), [103]), "1 shared"),
    "rows that are drawn": (loader(range(5)), DataLoader(whole, 8, sampler=RandomSampler(whole, num_samples=10)), "5 shared"),
    "rows of several processes": (
        Subset(whole, [0]),
        DataLoader(whole, 8, sampler=DistributedSampler(whole, 2, 1, shuffle=True)),
        "1 shared",
    ),
    "augmented images": (Subset(images, [1, 2]), Augmented(images, Augmentation(1)), "2 shared"),
    "augmented images of others": (Augmented(images, Augmentation(1)), Augmented(Images(pixels, y), Augmentation(1)), "100 shared"),
    "images that are normalised in another way": (images.take(torch.arange(8)), Images(pixels.clone(), y, [0.5], [0.2]), "8 equal"),
    "labels that were drawn and are their own": (
        mislabelled(images, 0.5, keep_own=True).forget,
        images,
        "16 equal",
    ),
    "records with other transforms": (Downloaded(range(10), twice), Downloaded(range(8, 50), noise), "2 equal, at index 0, 1$"),
    "files with other transforms": (Files(range(10), twice), Files(range(8, 50), noise), "2 equal, at index 0, 1$"),
    "a view in another order": (Own(range(10)), Turned(Subset(whole, range(5, 50)), torch.clone), "5 equal, at index 40, 41, 42, 43, 44$"),
    "twins in other datasets": (
        copied(range(5)),
        TensorDataset(torch.cat([x[9:20], x[:1]]), torch.cat([y[9:20], y[:1]])),
        "1 equal, at index 11$",
    ),
    "texts": ([{"text": ["a", "b"], "labels": y[:2]}], [{"text": ["c", "b"], "labels": y[:2]}], "1 equal, at index 1$"),
}

APART = {
    "rows from the first in order": (DataLoader(whole, 4, sampler=SequentialSampler(range(10))), Subset(whole, range(10, 50))),
    "rows from the first by chance": (DataLoader(whole, 4, sampler=RandomSampler(range(10))), Subset(whole, range(10, 50))),
    "rows from the first of a process": (
        Subset(whole, range(10, 50)),
        DataLoader(whole, 4, sampler=DistributedSampler(range(10), 1, 0)),
    ),
    "other rows of one label": (Subset(Reordered(one_label, None), range(10)), Subset(one_label, range(80))),
    "probabilities of other samples": (Subset(whole, range(5)), TensorDataset(x[5:].clone(), favoured[5:])),
    "probabilities of other classes": (Subset(whole, range(5)), TensorDataset(x, favoured.roll(1, 1))),
    "a dataset of batches": (Subset(whole, range(100)), DataLoader(TensorDataset(x.view(10, 10, 6) + 1, y.view(10, 10)), None)),
    "images of another size": (TensorDataset(torch.zeros(5, 1, 4, 4), y[:5]), TensorDataset(torch.zeros(5, 1, 8, 8), y[:5])),
    "texts of one length": ((tokens, y[:8]), (tokens + 50, y[:8])),
    "other labels": (TensorDataset(x[:40], (y[:40] + 1) % 4), whole),
    "other labels in another dataset": (Altered(Subset(whole, range(9)), (y[:9] + 1) % 4), whole),
    "labels that are put right": (mislabelled(images, 0.25).forget, images),
    "a trigger beside the clean samples": tuple(poisoned(images, 20, 1)),
    "a trigger that keeps the label": (Altered(images, y, lambda inputs: -inputs), images),
    "twins of one dataset": (Subset(same, range(5)), Subset(same, range(5, 20))),
    "twins in loaders of one dataset": (DataLoader(same, 4, sampler=range(5)), DataLoader(same, 4, sampler=range(5, 20))),
    "twins in memory": (TensorDataset(same.tensors[0][:5], same.tensors[1][:5]), TensorDataset(same.tensors[0][5:], same.tensors[1][5:])),
    "twins in a concatenation": (
        Subset(both := ConcatDataset([copied(range(20)), copied(range(20))]), range(20)),
        Subset(both, range(20, 40)),
    ),
    "rows that are expanded": (Subset(wide := TensorDataset(x[:1].expand(9, 6), y[:1].expand(9)), range(3)), Subset(wide, range(3, 9))),
    "a random split": tuple(random_split(whole, [20, 80])),
    "chance in a view": (View(Subset(whole, range(10)), noise), View(Subset(whole, range(10, 50)), noise)),
    "augmented images": (Subset(images, [1, 2]), Subset(Augmented(images, Augmentation(1)), range(3, 100))),
    "records with other transforms": (Downloaded(range(10), twice), Downloaded(range(10, 50), noise)),
    "the last batch is dropped": (Subset(whole, range(96, 100)), DataLoader(whole, 8, drop_last=True)),
    "rows of a process": (Subset(whole, [0]), DataLoader(whole, 8, sampler=DistributedSampler(whole, 2, 1, shuffle=False))),
    "a transposed tensor": (
        TensorDataset(square := torch.arange(36.0).view(6, 6), y[:6] * 0),
        TensorDataset(square.t()[1:], y[:5] * 0),
    ),
    "texts": ([{"text": ["a", "b"], "labels": y[:2]}], [{"text": ["b", "a"], "labels": y[:2]}]),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_samples_are_counted(name):
    forget, remain, message = SHARED[name]
    with pytest.raises(InputError, match=f"^remain: must not hold samples of the forget set; .*found .*{message}"):
        check_disjoint(forget, remain)


@pytest.mark.parametrize("name", APART)
def test_other_samples_are_let_through(name):
    check_disjoint(*APART[name])


class Object:
    def __init__(self, inputs) -> None:
        self.inputs = inputs


UNTOLD = {
    "rows that are mixed": (Subset(whole, range(5)), Subset(Mixed(whole, None), range(5, 90)), "samples differ from reading to reading"),
    "texts that are padded": ([(tokens, y[:8])], [(torch.nn.functional.pad(tokens, (0, 2)), y[:8])], "texts are padded to other lengths"),
    "chance": (Own(range(5), noise), Own(range(5, 20)), "samples differ from reading to reading"),
    "chance in remain data": (Own(range(5)), Own(range(5, 20), noise), "samples differ from reading to reading"),
    "chance in a stream": (Own(range(5)), DataLoader(Stream(range(5, 20), noise), 4), "samples differ from reading to reading"),
    "objects": (DataLoader(Own(range(5)), 4, collate_fn=Object), DataLoader(Own(range(9)), 4, collate_fn=Object), "not tensors"),
    "rows drawn anew": (
        Subset(TensorDataset(x + 1, y), range(5)),
        DataLoader(whole, 8, sampler=Every(range(30), True)),
        "draws other rows",
    ),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_compared_is_told(name):
    forget, remain, message = UNTOLD[name]
    with pytest.warns(UncheckedWarning, match=f"^remain: .*make sure that no.*{message}|^remain: its sampler {message}"):
        check_disjoint(forget, remain)


def test_training_on_what_must_go_is_refused_and_nothing_changed():
    data, model = cases.dataset(), cases.model()
    forget = TensorDataset(data.tensors[0][:12], data.tensors[1][:12])
    for remain in (data, DataLoader(data, 16, sampler=SubsetRandomSampler(range(8, 48))), list(DataLoader(data, 16))):
        with pytest.raises(InputError, match="^remain: must not hold samples of the forget set"):
            unlearn(model, forget, remain, Finetune(cases.QUICK))
    numbers = iter([data[:12]])
    with pytest.raises(InputError, match="^remain: must not be the forget set"):
        unlearn(model, numbers, numbers, Finetune(cases.QUICK))
    with pytest.warns(UncheckedWarning):
        chance = View(Subset(data, range(12, 48)), noise)
        chance.spare = data  # so that nobody can tell which it is a view of
        unlearn(model, forget, chance, GradientAscent(cases.QUICK), watch={})


def test_the_objective_says_what_a_label_is():
    objective = Objective(targets=lambda batch: batch["digit"])

    class Named(Dataset):
        """A view by name, with labels that are `shift` too large."""

        def __init__(self, inner, shift) -> None:
            self.inner, self.shift = inner, shift

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, index):
            sample = self.inner[index]
            return {"picture": noise(sample["picture"]), "digit": sample["digit"] + self.shift}

    inner = [{"picture": x[row], "digit": int(y[row])} for row in range(8)]
    data = Subset(inner, range(8))
    with pytest.raises(InputError, match="2 shared, the first at index 0"):
        check_disjoint(Subset(data, [0, 1]), Named(data, 0), objective)
    with pytest.warns(UncheckedWarning):  # with other labels it is no view of these samples, and chance leaves nothing to compare
        check_disjoint(Subset(data, [0, 1]), Named(data, 1), objective)


def test_data_of_one_dataset_are_not_read():
    class Unread(Own):
        def __getitem__(self, index):
            raise AssertionError("read")

    data = Unread(range(50))
    check_disjoint(Subset(data, range(5)), DataLoader(data, 4, sampler=SubsetRandomSampler(range(5, 50))))
    with pytest.raises(InputError, match="5 shared"):
        check_disjoint(Subset(data, range(5)), DataLoader(data, 4))


def test_shards_are_read_once_and_compared_with_all(monkeypatch):
    calls = []
    hashes = fingerprints._hashes
    monkeypatch.setattr(fingerprints, "_hashes", lambda column: calls.append(len(column)) or hashes(column))
    forget = ConcatDataset([copied(range(start, start + 5)) for start in range(0, 40, 5)])
    check_disjoint(forget, ConcatDataset([copied(range(start, start + 5)) for start in range(40, 80, 5)]))
    assert sum(calls) < 5 * 80  # columns and a few numbers of them, of every sample
    with pytest.raises(InputError, match="found 2 equal, at index 8, 9$"):
        check_disjoint(forget, ConcatDataset([copied(range(40, 48)), copied(range(37, 39))]))


def test_masks_do_not_confuse_datasets_that_are_gone():
    """What is made only to read a mask must not be taken for another dataset in its place in memory."""
    for _ in range(3):
        forget, remain = (Subset(copied(range(20)), torch.ones(20, dtype=torch.bool)) for _ in range(2))
        with pytest.raises(InputError, match="20 equal"):
            check_disjoint(forget, remain)


def test_large_data_are_not_hashed_where_a_few_numbers_tell_them_apart(monkeypatch):
    hashed = []
    original = fingerprints._hashes
    monkeypatch.setattr(fingerprints, "_hashes", lambda column: hashed.append(column.numel()) or original(column))
    many, labels = torch.randn(20_000, 192, generator=torch.Generator().manual_seed(0)), torch.arange(20_000) % 10
    check_disjoint(TensorDataset(many[:500].clone(), labels[:500]), TensorDataset(many[500:].clone(), labels[500:].clone()))
    assert sum(hashed) < many.numel() / 5
