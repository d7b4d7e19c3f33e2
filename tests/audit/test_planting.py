"""Planted samples: what changes and what stays, the key in a file, bad input."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from expunge.audit.planting import Key, add_noise, flip_coins, load_key, swap_labels
from expunge.data.batches import as_batches
from expunge.data.digest import data_digest
from expunge.errors import InputError
from expunge.storage.tensors import load_tensors, save_tensors


class Pictures(Dataset):
    """A user's own: (input, name, label), labels as plain numbers."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image, torch.tensor(index), int(label)


def plain(samples=60):
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 2, 3, generator=numbers), torch.arange(samples) % 4)


def samples_of(dataset):
    return [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("form", [lambda data: data, Pictures, lambda data: Subset(data, list(range(59, -1, -1)))])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_labels_of_two_classes_are_swapped_and_nothing_else(form, share):
    dataset = form(plain())
    planted, key = swap_labels(dataset, 1, 3, share)
    changed = set(key.rows.tolist())
    assert len(changed) == 2 * round(15 * share) and torch.equal(key.places, key.rows)
    for row, (before, after) in enumerate(zip(samples_of(dataset), samples_of(planted), strict=True)):
        assert torch.equal(before[0], after[0]) and type(before[-1]) is type(after[-1])
        assert int(after[-1]) == ({1: 3, 3: 1}[int(before[-1])] if row in changed else int(before[-1]))
    assert [int(label) for *_, label in samples_of(planted.forget())] == key.labels.tolist()


@pytest.mark.parametrize("form", [lambda data: data, Pictures])
def test_noise_is_on_its_samples_alone(form):
    dataset = form(plain())
    planted, key = add_noise(dataset, 0.25, 0.5)
    assert len(key.rows) == 15 and key.noise.shape == (15, 2, 3) and 0.3 < float(key.noise.std()) < 0.7
    noise = dict(zip(key.rows.tolist(), key.noise, strict=True))
    for row, (before, after) in enumerate(zip(samples_of(dataset), samples_of(planted), strict=True)):
        assert torch.allclose(after[0], before[0] + noise[row] if row in noise else before[0]) and int(before[-1]) == int(after[-1])


@pytest.mark.parametrize("wrong", [True, False])
def test_canaries_are_in_or_out_by_a_coin(wrong):
    dataset = plain(400)
    planted, key = flip_coins(dataset, 200, seed=3, wrong_labels=wrong)
    assert 70 < int(key.included.sum()) < 130 and len(planted) == 400 - int((~key.included).sum())
    left_out, given = set(key.rows[~key.included].tolist()), dict(zip(key.rows.tolist(), key.labels.tolist(), strict=True))
    rows = [row for row in range(400) if row not in left_out]
    for row, (image, label) in zip(rows, samples_of(planted), strict=True):
        assert torch.equal(image, dataset[row][0]) and int(label) == given.get(row, int(dataset[row][1]))
    assert bool((key.labels != key.true_labels).all()) is wrong
    assert torch.equal(torch.tensor(rows)[key.places], key.rows[key.included])


def test_canaries_can_be_named():
    for named in ([3, 5, -1], torch.tensor([3, 5, 59]), torch.isin(torch.arange(60), torch.tensor([3, 5, 59]))):
        assert flip_coins(plain(), named)[1].rows.tolist() == [3, 5, 59]


def test_coins_do_not_depend_on_which_samples_were_drawn():
    """Over seeds, a row that is a canary is in as often as not: neither its place nor its neighbours tell."""
    inside, times = torch.zeros(60), torch.zeros(60)
    for seed in range(400):
        key = flip_coins(plain(), 30, seed)[1]
        inside[key.rows] += key.included
        times[key.rows] += 1
    assert bool(((inside / times - 0.5).abs() < 4 * 0.5 / times.sqrt()).all())


@pytest.mark.parametrize("plant", [lambda d: swap_labels(d, 0, 1), lambda d: add_noise(d, 0.5, 0.1), lambda d: flip_coins(d, 20)])
def test_batches_are_the_samples_and_seeds_repeat(plant):
    dataset = plain()
    planted, key = plant(dataset)
    images, labels = (torch.cat(parts) for parts in zip(*as_batches(planted, "data", 7), strict=True))
    again = plant(dataset)[0]
    assert torch.equal(images, torch.stack([sample[0] for sample in samples_of(again)]))
    assert labels.tolist() == [int(sample[1]) for sample in samples_of(again)] == planted.targets.tolist()
    assert int(planted[-1][1]) == labels[-1] and data_digest(planted) is not None
    with pytest.raises(IndexError):
        planted[len(planted)]
    assert torch.equal(pickle.loads(pickle.dumps(planted))[1][0], planted[1][0])


@pytest.mark.parametrize("plant", [lambda d: swap_labels(d, 0, 1, 0.3), lambda d: add_noise(d, 0.5, 0.1), lambda d: flip_coins(d, 20)])
def test_a_key_is_kept(plant, tmp_path):
    key = plant(plain())[1]
    again = load_key(key.save(tmp_path / "key.safetensors"))
    assert (again.kind, again.size, again.deviation) == (key.kind, key.size, key.deviation)
    for name in ("rows", "labels", "true_labels", "included"):
        assert torch.equal(getattr(again, name), getattr(key, name))
    assert key.noise is None or torch.equal(again.noise, key.noise)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors, form: tensors.pop("labels"),
        lambda tensors, form: form.update(planted="nothing"),
        lambda tensors, form: form.update(size="3"),
        lambda tensors, form: tensors.update(included=tensors["included"][:2]),
        lambda tensors, form: tensors.update(noise=torch.zeros(20, 1)),
    ],
)
def test_a_file_that_is_no_key_is_named(spoil, tmp_path):
    path = flip_coins(plain(), 20)[1].save(tmp_path / "key.safetensors")
    tensors, form = load_tensors(path, "planting key")
    spoil(tensors, form)
    save_tensors(path, tensors, form)
    with pytest.raises(InputError, match="path: must hold all of a planting key"):
        load_key(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swap_labels(plain(), 1, 1), "first: must be another class"),
        (lambda: swap_labels(plain(), 1, 9), "second: must be another class of the dataset than the other one; found 9"),
        (lambda: swap_labels(plain(), 1, 2, 0.0), "share"),
        (lambda: add_noise(plain(), 0.5, 0.0), "deviation"),
        (lambda: add_noise(TensorDataset(torch.zeros(9, 2).long(), torch.arange(9)), 0.5, 1.0), "dataset: inputs must be floating-point"),
        (lambda: add_noise(TensorDataset(torch.zeros(9, 2)), 0.5, 1.0), "dataset: samples must be"),
        (lambda: swap_labels(iter([]), 0, 1), "dataset: must have a length and items"),
        (lambda: flip_coins(plain(), 61), "canaries"),
        (lambda: flip_coins(plain(), [99]), "canaries"),
        (lambda: flip_coins(plain(), []), "canaries"),
        (lambda: flip_coins(plain(), [7, 7]), "canaries"),
        (
            lambda: flip_coins(TensorDataset(torch.zeros(9, 2), torch.zeros(9).long()), 3, wrong_labels=True),
            "must have two classes",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_key_says_what_its_planted_data_have():
    key = Key("coins", torch.tensor([1, 3]), torch.tensor([0, 0]), torch.tensor([0, 0]), torch.tensor([False, True]), 5)
    assert key.kept.tolist() == [0, 2, 3, 4] and key.places.tolist() == [2]
