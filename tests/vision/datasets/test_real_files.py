"""The readers on real files: `EXPUNGE_DATA=folder make test-data`. A dataset that is not in the folder is skipped, and named."""

from __future__ import annotations

import os

import pytest
import torch

import expunge
from expunge.vision import datasets
from expunge.vision.networks import resnet8

if not os.environ.get(datasets.VARIABLE):
    pytest.skip(f"{datasets.VARIABLE} is not set: real files are not tested", allow_module_level=True)

# classes, images to train and test a class (None: they differ, see the total), shape, and the published mean and deviation of the channels
FACTS = {
    "cifar10": (10, 5000, 1000, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (100, 500, 100, (3, 32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": (10, None, None, (1, 28, 28), (0.1307,), (0.3081,)),
    "fashion-mnist": (10, 6000, 1000, (1, 28, 28), (0.2860,), (0.3530,)),
    "tiny-imagenet": (None, 500, 50, (3, 64, 64), None, None),
}
TOTALS = {"mnist": (60_000, 10_000)}
PLACES = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
PLACES["tiny-imagenet"] = "tiny-imagenet-200"
HERE = [name for name, place in PLACES.items() if list(datasets.data_folder().glob(f"{place}*"))]


@pytest.fixture(scope="module", params=FACTS)
def found(request):
    if request.param not in HERE:
        pytest.skip(f"{datasets.data_folder() / PLACES[request.param]} is not there; `expunge data get {request.param}`")
    return request.param, datasets.load(request.param)


def test_something_is_there():
    assert HERE, f"no dataset under {datasets.data_folder()}"


def test_sizes_classes_and_statistics(found):
    name, data = found
    classes, train, test, shape, mean, std = FACTS[name]
    assert (data.channels, *data.size) == shape
    assert classes in (None, data.classes)
    for part, each in ((data.train, train), (data.test, test)):
        assert each is None or torch.bincount(part.labels).tolist() == [each] * data.classes
    assert name not in TOTALS or (len(data.train), len(data.test)) == TOTALS[name]
    if mean is not None:
        assert data.mean == pytest.approx(mean, abs=6e-5) and data.std == pytest.approx(std, abs=6e-5)
    inputs, _ = data.train.batch_of(torch.arange(0, len(data.train), 10))
    assert inputs.isfinite().all() and abs(float(inputs.mean())) < 0.05 and abs(float(inputs.std()) - 1) < 0.05


def test_a_validation_part_is_kept_from_the_training_data(found):
    _, data = found
    train, validation = datasets.split(data.train, 0.1, seed=0)
    shares = torch.bincount(validation.labels) / torch.bincount(data.train.labels)
    assert len(train) + len(validation) == len(data.train) and (shares - 0.1).abs().max() < 0.001


def test_one_epoch_of_training_learns_something(found):
    _, data = found
    classes = torch.nonzero(data.train.labels < 10).flatten()
    rows = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))[:600]]
    some = data.train.take(rows)
    torch.manual_seed(0)
    model = resnet8(data.classes, data.channels, width=8)
    expunge.train(model, some, expunge.Tuning(expunge.Constant(0.05, epochs=1), batch_size=16))
    assert expunge.metrics.accuracy(model, some) > 0.15  # ten classes
