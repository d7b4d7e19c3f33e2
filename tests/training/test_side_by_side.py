"""Trainings side by side: each ends as it would alone."""

import random

import numpy
import pytest
import torch

from expunge.errors import InputError
from expunge.runtime.modes import Generators
from expunge.training.loop import train
from expunge.training.schedules import Constant, Steps
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning
from tests.training.test_loop import data, equal, network


class Drawing(torch.utils.data.Dataset):
    """Samples with noise of all three kinds of random numbers."""

    def __init__(self, samples):
        self.held = data(samples)

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        inputs, label = self.held[index]
        return inputs + torch.randn(()) + numpy.random.normal() + random.random(), label


SIDE_BY_SIDE = [
    (network, Drawing(40), Tuning(Constant(0.1, 3), batch_size=7, seed=4)),
    (network, data(25), Tuning(Steps(0.1, 5, (2.5,)), batch_size=6, seed=5)),
    (lambda: network(1), Drawing(33), Tuning(Constant(0.01, 1), batch_size=8, seed=4, optimizer=torch.optim.Adam)),
]


def test_together_data_that_can_be_read_once_are_read_once():
    model, alone = network(), network()
    train_together([Training(model, iter([data(8)[:], data(6)[:]]), Tuning(Constant(0.1, 2)))])
    train(alone, [data(8)[:], data(6)[:]], Tuning(Constant(0.1, 2)))
    assert equal(model, alone)


def test_together_each_ends_as_alone():
    models = [build() for build, _, _ in SIDE_BY_SIDE]
    before = Generators.now()
    with torch.no_grad():
        train_together([Training(model, *rest) for model, (_, *rest) in zip(models, SIDE_BY_SIDE, strict=True)])
    assert before.same_as(Generators.now())
    for model, (build, samples, tuning) in zip(models, SIDE_BY_SIDE, strict=True):
        alone = build()
        train(alone, samples, tuning)
        assert equal(model, alone)


def test_together_epochs_end_in_turn_and_any_may_end_its_training():
    seen: list[tuple[str, int]] = []

    def noting(name, last=99):
        def after_epoch(epoch):
            seen.append((name, epoch))
            return epoch == last

        return after_epoch

    short, long, ended = (Training(network(), data(size), Tuning(Constant(0.1, 3), batch_size=10)) for size in (10, 40, 10))
    trainings = [(short, noting("short")), (long, noting("long")), (ended, noting("ended", 2))]
    train_together([Training(each.model, each.data, each.tuning, after) for each, after in trainings])
    short_ones = [("short", 1), ("ended", 1), ("short", 2), ("ended", 2), ("short", 3)]
    assert seen == [*short_ones, ("long", 1), ("long", 2), ("long", 3)]


def test_together_one_failure_stops_all_and_leaves_nothing_behind():
    bad = data()
    bad.tensors[0][7, 2] = float("inf")
    models = [network().eval(), network().eval()]
    before = Generators.now()
    with pytest.raises(InputError, match="data: .*finite"):
        train_together([Training(models[0], data(), Tuning(seed=1)), Training(models[1], bad, Tuning(seed=2))])
    assert before.same_as(Generators.now()) and not any(module.training for model in models for module in model.modules())


def test_together_progress_counts_all_steps(capsys):
    train_together([Training(network(), data(40), Tuning(Constant(0.1, epochs), batch_size=10)) for epochs in (1, 2)], progress=True)
    assert capsys.readouterr().err.startswith("training: 12 steps")
