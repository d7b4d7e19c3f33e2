"""LoTUS: the answers that are drawn, the temperature, where it stops, and the training equal to a plain loop."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from expunge import metrics
from expunge.errors import InputError, NoEffectWarning
from expunge.methods import LoTUS
from expunge.methods.tempering import drawn
from expunge.training.loop import train
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET, REMAIN, SIZE, TWO_EPOCHS


def noisy(logits):
    """Logits with Gumbel noise, drawn as torch draws it."""
    return logits - torch.empty_like(logits).exponential_().log()


def test_answers_are_soft_where_forgotten_and_one_class_elsewhere():
    logits, forgotten = torch.tensor([[1.0, 2.0, 0.0]] * 4, dtype=torch.float64), torch.tensor([True, False, True, False])
    torch.manual_seed(0)
    found = drawn(logits, forgotten, 3.0)
    torch.manual_seed(0)
    soft, hard = (noisy(logits) / 3).softmax(1), noisy(logits).argmax(1)
    torch.testing.assert_close(found[forgotten], soft[forgotten])
    assert torch.equal(found[~forgotten], torch.nn.functional.one_hot(hard, 3)[~forgotten].double())


def test_the_one_class_is_drawn_by_the_originals_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0])
    torch.manual_seed(1)
    found = drawn(logits.repeat(20000, 1), torch.zeros(20000, dtype=torch.bool), 1.0)
    torch.testing.assert_close(found.mean(0), logits.softmax(0), atol=0.015, rtol=0)


def test_answers_are_uniform_at_a_high_temperature_and_have_positions():
    found = drawn(torch.randn(5, 4, 3, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bool), math.exp(100))
    assert found.dtype == torch.float32 and found.shape == (5, 4, 3)
    torch.testing.assert_close(found, torch.full((5, 4, 3), 0.25))


@pytest.mark.parametrize("name", small.NETWORKS)
def test_it_is_the_plain_loop(name):
    """The temperature of every epoch follows the accuracy before it."""
    model, remain, images = small.network(name), small.remain(), small.forget().tensors[0]
    forget = TensorDataset(images, model(images).argmax(1))  # of which it knows all
    outcome = unlearn(model, forget, remain, LoTUS(3.0, 0.0, TWO_EPOCHS))
    teacher, student = copy.deepcopy(model).eval(), copy.deepcopy(model)
    velocity, temperatures = {name: torch.zeros_like(value) for name, value in student.named_parameters()}, []
    torch.manual_seed(TWO_EPOCHS.seed)
    for epoch in range(2):
        with torch.no_grad():
            right = student.eval()(forget.tensors[0]).argmax(1) == forget.tensors[1]
        temperatures.append(math.exp(3 * float(right.double().mean())))
        student.train()
        steps = reference.cut(REMAIN, SIZE, seed=3 + epoch)
        for kept, lost in zip(steps, reference.shares(FORGET, len(steps), seed=3 + epoch), strict=True):
            images = torch.cat([remain.tensors[0][kept], forget.tensors[0][lost]])
            logits = teacher(images).detach()
            soft, hard = (noisy(logits) / temperatures[-1]).softmax(1), torch.nn.functional.one_hot(noisy(logits).argmax(1), small.CLASSES)
            goal = torch.cat([hard[: len(kept)].double(), soft[len(kept) :]])
            student.zero_grad()
            (-(goal * student(images).log_softmax(1)).sum() / len(images)).backward()
            for key, value in student.named_parameters():
                velocity[key] = 0.9 * velocity[key] + value.grad + 0.01 * value.detach()
                value.data -= 0.02 * velocity[key]
    assert temperatures[0] == pytest.approx(math.exp(3))
    small.assert_close(outcome.model, student, model)


def learnt():
    """A network that knows three classes, and its data."""
    model = cases.model()
    train(model, cases.dataset(), Tuning(Constant(0.05, 20), batch_size=16))
    return model


MANY = Tuning(Constant(0.05, 30), batch_size=16)


def test_a_class_is_forgotten_and_there_it_stops():
    """To go on at a temperature of 1 would teach it again."""
    outcome = unlearn(learnt(), cases.forget(), cases.remain(), LoTUS(32.0, tuning=MANY))
    accuracies = [record.accuracies["forget"] for record in outcome.epochs]
    assert accuracies[0] > 0.9 and accuracies[-1] == 0 and 1 < len(accuracies) <= 30
    assert all(accuracy > 0 for accuracy in accuracies[:-1])


def test_it_stops_below_the_accuracy_on_unseen_data():
    model = learnt()
    outcome = unlearn(model, cases.forget(), cases.remain(), LoTUS(32.0, 0.8, MANY))
    accuracies = [record.accuracies["forget"] for record in outcome.epochs]
    assert accuracies[-1] <= 0.79 and all(accuracy > 0.79 for accuracy in accuracies[:-1]) and 1 < len(accuracies) <= 30


def some(model):
    """Samples of all classes to forget, the others to keep, and the accuracy on these."""
    data = cases.dataset()
    forget, remain = Subset(data, range(12)), Subset(data, range(12, 48))
    return forget, remain, metrics.accuracy(model, remain)


def test_without_held_out_data_the_target_is_0_for_a_class_and_the_remain_accuracy_else():
    model = cases.model()
    forget, remain, accuracy = some(model)
    given, found = (unlearn(model, forget, remain, LoTUS(9.0, value, cases.QUICK)).model for value in (accuracy, None))
    properties.assert_same_weights(given.state_dict(), found.state_dict())
    given, found = (unlearn(model, cases.forget(), cases.remain(), LoTUS(9.0, value, cases.QUICK)).model for value in (0.0, None))
    properties.assert_same_weights(given.state_dict(), found.state_dict())


def wrong():
    """Forget samples with labels that the network does not give, of classes that remain."""
    images, labels = cases.dataset().tensors
    return TensorDataset(images[:12], (labels[:12] + 1) % 3), Subset(cases.dataset(), range(12, 48))


def test_where_it_is_there_already_it_warns():
    model = learnt()
    with pytest.warns(
        NoEffectWarning, match="LoTUS changed nothing: the accuracy on the forget data is 0 already, .* give unseen_accuracy"
    ):
        outcome = unlearn(model, *wrong(), LoTUS(tuning=cases.QUICK))
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())
    assert [record.epoch for record in outcome.history] == [None, 0]


def test_a_larger_gain_forgets_faster():
    model = learnt()
    one = Tuning(Constant(0.01, 2), batch_size=16)
    ends = [unlearn(model, cases.forget(), cases.remain(), LoTUS(gain, tuning=one)).model for gain in (0.0, 2.0, 32.0)]
    images = cases.dataset().tensors[0][::3]
    chances = [float(network.eval()(images).softmax(1)[:, 0].mean().detach()) for network in ends]
    assert all(first > second for first, second in pairwise(chances)), chances


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gain": -1}, r"^gain: must be in \[0, 100\]; found -1"),
        ({"gain": 800}, r"^gain: must be in \[0, 100\]; found 800"),
        ({"unseen_accuracy": 95}, r"^unseen_accuracy: must be a fraction in \[0, 1\], or None; found 95"),
        ({"tuning": None}, "^tuning: LoTUS trains, and needs a Tuning; found None"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        LoTUS(**settings)
