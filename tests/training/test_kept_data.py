"""A kept training goes on with the data it began with, and with no others that can be told from them."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from expunge.errors import MismatchError
from expunge.storage import tensors as artifacts
from expunge.storage.tensors import weights_digest
from expunge.training.loop import train
from expunge.training.side_by_side import Training, train_together
from tests.training.test_checkpoints import TUNINGS, Noisy, Stop, network, stop_after


def held() -> TensorDataset:
    return TensorDataset(Noisy().x, Noisy().y)


class NoisyTensors(TensorDataset):
    """What it gives differs from reading to reading, what it holds does not."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + numpy.random.normal(scale=0.1) + 0.1 * torch.randn(6), y


def relabelled(data: TensorDataset) -> TensorDataset:
    x, y = data.tensors
    return type(data)(x, (y + (torch.arange(len(y)) == 5)) % 3)


def replaced(data: TensorDataset) -> TensorDataset:
    x, y = data.tensors
    return type(data)(torch.where(torch.arange(len(y))[:, None] == 5, x.roll(1, 0), x), y)


def turned(data: TensorDataset) -> TensorDataset:
    return type(data)(*(tensor.flip(0) for tensor in data.tensors))


FORMS = {
    "tensors": lambda data: data,
    "subset": lambda data: Subset(data, range(len(data))),
    "noise": lambda data: NoisyTensors(*data.tensors),
    "loader": lambda data: DataLoader(data, 7, shuffle=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_training_of_data_that_can_be_told_ends_with_the_same_weights(form, tmp_path):
    path, whole, model, tuning = tmp_path / "state", network(), network(seed=9), TUNINGS["momentum"]
    train(whole, FORMS[form](held()), tuning)
    with pytest.raises(Stop):
        train(network(), FORMS[form](held()), tuning, after_epoch=stop_after(3), keep=path)
    train(model, FORMS[form](held()), tuning, keep=path)
    assert weights_digest(model) == weights_digest(whole)


def begun_with(data, path: Path) -> bytes:
    with pytest.raises(Stop):
        train(network(), data, TUNINGS["momentum"], after_epoch=stop_after(3), keep=path)
    return path.read_bytes()


@pytest.mark.parametrize("change", [relabelled, replaced, turned])
@pytest.mark.parametrize("form", FORMS)
def test_other_data_are_refused_and_nothing_changed(form, change, tmp_path):
    path, model = tmp_path / "state", network(seed=9)
    content = begun_with(FORMS[form](held()), path)
    before, state, other = weights_digest(model), torch.get_rng_state(), FORMS[form](change(held()))
    told = "state is of a training on other data; keep this one in another file, or folder"
    with pytest.raises(MismatchError, match=told):
        train(model, other, TUNINGS["momentum"], keep=path)
    with pytest.raises(MismatchError, match=told):
        train_together([Training(model, other, TUNINGS["momentum"], keep=path)])
    assert weights_digest(model) == before and path.read_bytes() == content and torch.equal(torch.get_rng_state(), state)


def test_other_rows_are_refused(tmp_path):
    begun_with(held(), tmp_path / "state")
    with pytest.raises(MismatchError, match="other data"):
        train(network(), Subset(held(), [*range(21), 0]), TUNINGS["momentum"], keep=tmp_path / "state")


def test_a_file_from_before_data_were_told_goes_on(tmp_path):
    path, whole, model, tuning = tmp_path / "state", network(), network(seed=9), TUNINGS["momentum"]
    begun_with(held(), path)
    tensors, metadata = artifacts.load_tensors(path, "training")
    settings = json.loads(metadata["settings"])
    assert settings.pop("data")
    artifacts.save_tensors(path, tensors, metadata | {"settings": json.dumps(settings)})
    train(whole, held(), tuning)
    with pytest.raises(Stop):
        train(model, held(), tuning, after_epoch=stop_after(5), keep=path)
    with pytest.raises(MismatchError, match="other data"):  # from then on they are
        train(model, relabelled(held()), tuning, keep=path)
    train(model, held(), tuning, keep=path)
    assert weights_digest(model) == weights_digest(whole)


def test_data_that_cannot_be_told_go_on(tmp_path):
    path, data = tmp_path / "state", held()
    begun_with(data, path)
    train(network(), [tuple(tensor[rows] for tensor in data.tensors) for rows in torch.arange(22).split(7)], TUNINGS["momentum"], keep=path)
