"""A training stops where its loss explodes, and says at which rate; what begins high, rises on purpose or recovers is let go on."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import DivergedError
from expunge.metrics import accuracy
from expunge.training.explosion import FACTOR, Explosion
from expunge.training.loop import Phase, train, train_phases
from expunge.training.schedules import Constant, OneCycle, Steps, replay
from expunge.training.tuning import Tuning

CLASSES = 4
PAPER = Tuning(replay(Steps(), epochs=5), batch_size=8)


def large_inputs(scale: float = 30.0) -> TensorDataset:
    """Inputs that nobody normalised, of classes that can be told apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(320) % CLASSES
    inputs = torch.randn(320, 16, generator=generator) + 3 * nn.functional.one_hot(labels, 16)
    return TensorDataset(scale * inputs, labels)


def pretrained(data: TensorDataset) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    train(model, data, Tuning(Constant(1e-3, 8), batch_size=8, optimizer=torch.optim.Adam))
    assert accuracy(model, data) > 0.9
    return model


def test_the_papers_rate_explodes_on_a_network_that_it_does_not_suit():
    data = large_inputs()
    message = (
        r"^the loss exploded: its median is .* in epoch 1, where the first step or a uniform guess had .*, at the learning rate 0\.1 of "
        r"Replay\(schedule=Steps\(base=0\.1, .*; give a lower rate, such as Tuning\(Constant\(0\.01, epochs=5\)\)$"
    )
    with pytest.raises(DivergedError, match=message):
        train(pretrained(data), data, PAPER)


def test_the_default_schedule_is_short_and_gentle():
    schedule = Tuning().schedule
    assert schedule.epochs == 5 and max(schedule.rate(step / 100) for step in range(500)) == 0.01
    assert [schedule.rate(time) for time in (0, 0.25, 0.5, 2.5, 3.75)] == pytest.approx([0, 0.005, 0.01, 0.001, 0.0001])
    data = large_inputs(scale=1.0)
    model = pretrained(data)
    before = accuracy(model, data)
    train(model, data, Tuning(batch_size=8))
    assert accuracy(model, data) >= before


def test_a_network_that_begins_as_garbage_is_trained():
    data = large_inputs(scale=1.0)
    model = pretrained(data)
    with torch.no_grad():
        model[2].weight.mul_(-1e4)
    images, labels = data.tensors
    assert nn.functional.cross_entropy(model(images), labels) > FACTOR * math.log(CLASSES)
    train(model, data, Tuning(Constant(1e-6, 2), batch_size=8))


def test_a_loss_of_ones_own_may_rise_or_be_of_any_size():
    data = large_inputs()
    phase = Phase(as_batches(data, batch_size=8), "forget", lambda model, batch, losses: 1e6 * losses(model(batch[0]), batch[1]).mean())
    train_phases(pretrained(data), lambda epoch: [phase], Tuning(Constant(1e-12, 2)))
    large = Objective(losses=lambda logits, targets: 1e6 * nn.functional.cross_entropy(logits, targets, reduction="none"))
    train(pretrained(data), data, Tuning(Constant(1e-12, 2), batch_size=8), large)


def judged(*epochs: list[float], first: float = 0.5, source=None) -> None:
    explosion = Explosion(PAPER, Objective())
    explosion.begin(torch.tensor(first), torch.Size([2, CLASSES]))
    for epoch, losses in enumerate(epochs):
        explosion.check(torch.tensor(losses), epoch, [source])


HIGH = 2 * FACTOR * math.log(CLASSES)


def test_what_counts_is_the_median_of_twenty_steps():
    judged([0.5] * 11 + [HIGH] * 10)  # a spike that passes
    judged([0.5, HIGH, HIGH], [HIGH, 1.0, 0.5])  # few steps may go up and come down
    judged([HIGH] * 30, first=HIGH)
    judged([FACTOR * math.log(CLASSES) - 1] * 30)
    with pytest.raises(DivergedError, match="exploded: .* in epoch 1,"):
        judged([0.5] * 10 + [HIGH] * 11)
    with pytest.raises(DivergedError, match="exploded: .* in epoch 4,"):
        judged(*[[HIGH] * 5] * 4)


def test_data_in_the_order_of_their_classes_are_judged_from_the_second_epoch_on():
    """The first batch may be of the one class that a broken network still knows."""
    data = large_inputs()
    judged([0.5] + [HIGH] * 30, source=DataLoader(data))
    with pytest.raises(DivergedError):
        judged([0.5] + [HIGH] * 30, [2 * FACTOR * HIGH] * 30, source=DataLoader(data))
    with pytest.raises(DivergedError):
        judged([0.5] + [HIGH] * 30, source=DataLoader(data, shuffle=True))


def test_a_loss_that_is_no_longer_finite_names_the_rate():
    message = r"^the loss is no longer finite: epoch 1, iteration \d+ of 40, at the learning rate 1e\+30 of Constant\(.*; give a lower rate"
    with pytest.raises(DivergedError, match=message):
        train(pretrained(large_inputs()), large_inputs(), Tuning(Constant(1e30, 2), batch_size=8))


def test_a_loss_that_never_was_finite_is_not_blamed_on_the_rate():
    never = Objective(losses=lambda logits, targets: logits.sum(1) * torch.inf, classes=True)
    with pytest.raises(DivergedError, match="^the loss is not finite before the first step: look at the data, the outputs and the loss$"):
        train(pretrained(large_inputs()), large_inputs(), Tuning(OneCycle(0.1, 2), batch_size=8), never)
