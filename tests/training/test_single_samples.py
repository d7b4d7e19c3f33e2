"""Batches of one sample, and batches that do not come: left out, counted or refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.training.loop import train
from expunge.training.schedules import Constant
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning
from tests.training.test_loop import data, network, ones


def test_a_lone_last_sample_does_not_stop_batchnorm():
    train(network(), data(9), Tuning(Constant(0.1, 2), batch_size=4))


def seen_by(model: nn.Module, train_on) -> list[int]:
    """The sizes of the batches a module is given in train mode."""
    sizes: list[int] = []
    hook = model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)) if module.training else None)
    train_on()
    hook.remove()
    return sizes


def test_a_lone_sample_is_left_out_only_where_batchnorm_would_refuse_it():
    refusing, pictures = network(), TensorDataset(torch.randn(5, 1, 4, 4), torch.arange(5) % 3)
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    tuning = Tuning(Constant(0.1, 1), batch_size=4)
    assert seen_by(refusing, lambda: train(refusing, data(9), tuning)) == [4, 4]
    assert seen_by(refusing, lambda: train(refusing, [data(1)[:], data(3)[:]], tuning)) == [3]
    assert sorted(seen_by(convolution, lambda: train(convolution, pictures, tuning))) == [1, 4]
    one_by_one = DataLoader(pictures, batch_size=1)
    assert seen_by(convolution, lambda: train(convolution, one_by_one, tuning)) == [1] * 5


def test_in_eval_mode_no_sample_is_left_out():
    sizes, model = [], network()
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    train(model, data(9), Tuning(Constant(0.1, 1), batch_size=4, eval_mode=True))
    assert sorted(sizes) == [1, 4, 4]


def test_batches_of_one_alone_are_refused_where_batchnorm_would_refuse_them_all():
    with pytest.raises(InputError, match="data: BatchNorm needs two samples"):
        train(network(), DataLoader(data(3), batch_size=1), Tuning(Constant(0.1, 1)))


class Stream(IterableDataset):
    """Says it holds `length` samples, and gives those of an iterator that can be read once, or of a list."""

    def __init__(self, samples, length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter(self.samples)


def test_a_loader_that_can_be_read_only_once_is_refused():
    samples = [data()[row] for row in range(40)]
    with pytest.raises(InputError, match="data: a loader must give its batches each time"):
        train(network(), DataLoader(Stream(iter(samples), 40), batch_size=10), Tuning(Constant(0.1, 2)))


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
def test_a_loader_with_more_batches_than_its_length_is_refused():
    samples = [data()[row] for row in range(40)]
    with pytest.raises(InputError, match="data: a loader must not give more batches than its length; found more than 3"):
        train(network(), DataLoader(Stream(samples, 30), batch_size=10), Tuning(Constant(0.1, 2)))


def test_a_loader_with_fewer_batches_than_its_length_is_refused():
    loader = DataLoader(Stream([data()[row] for row in range(20)], 40), batch_size=10)
    with pytest.raises(InputError, match="^data: must give 4 batches, its length, each time it is read .*; found 2$"):
        train_together([Training(network(), loader, Tuning(Constant(0.1, 1)))])


def test_the_mean_loss_counts_the_batches_that_came():
    noted, loader = [], DataLoader(data(21), batch_size=10)  # the last batch, of one sample, is left out
    tuning = Tuning(Constant(0.1, 1))
    train_together([Training(network(), loader, tuning, note_loss=lambda epoch, loss: noted.append(loss))], Objective(losses=ones))
    assert noted == [1.0]
