"""SFRon: the coefficients, the salient weights, both kinds of steps equal to a plain loop, and what is refused."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.methods import SFRon
from expunge.methods.alternating import adaptive_mean
from expunge.methods.streams import interleaved
from expunge.training.single_samples import SingleSampleFilter
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, small
from tests.methods.small import FORGET, REMAIN, SIZE, TWO_EPOCHS

every_network = pytest.mark.parametrize("name", small.NETWORKS)


def salient(model, threshold):
    few, many = (reference.fisher(model, data.tensors) for data in (small.forget(), small.remain()))
    return {name: total / FORGET >= threshold * many[name] / REMAIN for name, total in few.items()}


def squares(model, data, size=128):
    model, totals = copy.deepcopy(model).eval(), {}
    batches = list(zip(*(tensor.split(size) for tensor in data.tensors), strict=True))
    for images, labels in batches:
        model.zero_grad()
        cross_entropy(model(images), labels).backward()
        for name, value in model.named_parameters():
            totals[name] = totals.get(name, 0) + value.grad**2 / len(batches)
    return totals


def alternated(model, mask, method, forget, remain):
    """Steps up by the salient weights, their gradient clipped, and down by all of them, with one momentum."""
    model = copy.deepcopy(model).train()
    velocity = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    clipped = 0
    for epoch in range(method.tuning.schedule.epochs):
        seed = method.tuning.seed + epoch
        rounds = [rows for turn in range(9) for rows in reference.cut(len(forget), SIZE, seed + turn)]
        plan = []
        for step, rows in enumerate(reference.cut(len(remain), SIZE, seed)):
            if step % method.remain_steps == 0:
                plan.append((True, forget, rounds.pop(0)))
            plan.append((False, remain, rows))
        for ascends, data, rows in plan:
            model.zero_grad()
            losses = cross_entropy(model(data.tensors[0][rows]), data.tensors[1][rows], reduction="none")
            if ascends:
                weights = [1 / float(loss) ** method.smoothing for loss in losses.detach()]
                loss = -method.forget_weight * sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
            else:
                loss = losses.mean()
            loss.backward()
            gradient = {name: value.grad * (mask[name] if ascends else 1) for name, value in model.named_parameters()}
            norm = sum(float(part.square().sum()) for part in gradient.values()) ** 0.5
            shrunk = min(1.0, method.max_norm / (norm + 1e-6)) if ascends else 1.0
            clipped += shrunk < 1
            for name, value in model.named_parameters():
                velocity[name] = 0.9 * velocity[name] + shrunk * gradient[name] + 0.01 * value.detach()
                value.data -= 0.02 * velocity[name]
    return model, clipped


@every_network
@pytest.mark.parametrize(("remain_steps", "max_norm"), [(2, 1e9), (5, 0.5)])
def test_it_is_the_plain_loop(name, remain_steps, max_norm):
    model, forget, remain = small.network(name), small.forget(), small.remain()
    method = SFRon(1.2, 2.0, 0.7, max_norm, remain_steps, tuning=TWO_EPOCHS)
    outcome = unlearn(model, forget, remain, method, batch_size=5)
    mask = salient(model, 1.2)
    assert 0 < sum(int(part.sum()) for part in mask.values()) < sum(part.numel() for part in mask.values())
    expected, clipped = alternated(model, mask, method, forget, remain)
    assert clipped == (2 if max_norm < 1 else 0)
    small.assert_close(outcome.model, expected, model)


def test_as_released_squares_gradients_of_batches_of_128():
    model, forget, remain = small.network("residual"), small.pictures(140, seed=21), small.pictures(150, seed=22)
    method = SFRon.as_released(TWO_EPOCHS)
    assert (method.kind, method.threshold, method.forget_weight) == ("loss-batch", 1.0, 25.0)
    few, many = squares(model, forget), squares(model, remain)
    mask = {name: few[name] >= many[name] for name in few}
    exact = {
        name: a / 140 >= b / 150
        for (name, a), b in zip(
            reference.fisher(model, forget.tensors).items(), reference.fisher(model, remain.tensors).values(), strict=True
        )
    }
    assert any(not torch.equal(mask[name], exact[name]) for name in mask)
    outcome = unlearn(model, forget, remain, method)
    small.assert_close(outcome.model, alternated(model, mask, method, forget, remain)[0], model)


def test_the_coefficients():
    losses = torch.tensor([1.0, 4.0], dtype=torch.float64, requires_grad=True)
    mean = adaptive_mean(losses, 0.5)
    assert mean.item() == pytest.approx((1 * 1 + 0.5 * 4) / 1.5)
    mean.backward()  # the coefficients are held fixed
    assert losses.grad.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert adaptive_mean(losses, 0.0).item() == pytest.approx(2.5)
    known = adaptive_mean(torch.tensor([0.0, 2.0]), 1.0)
    assert known.item() == pytest.approx(0, abs=1e-6)  # a loss of 0 has all the weight, and no gradient to give
    assert torch.isfinite(adaptive_mean(torch.tensor([-1.0, 2.0]), 0.5))  # of an objective of one's own


def test_where_nothing_is_salient_forget_steps_are_momentum_alone():
    model = small.network("no BatchNorm")
    still = Tuning(TWO_EPOCHS.schedule, batch_size=SIZE, momentum=0.0, weight_decay=0.0, seed=3)
    first, second = (unlearn(model, small.forget(), small.remain(), SFRon(1e300, weight, tuning=still)).model for weight in (0.0, 9.0))
    small.assert_close(first, second, model)


def test_forget_batches_are_cycled_between_the_remain_batches():
    forget, remain = (as_batches(TensorDataset(torch.arange(count), torch.zeros(count)), batch_size=2) for count in (6, 13))
    stream = interleaved(forget, remain, 2, SingleSampleFilter(cases.model(), Objective()))
    batches = list(stream.shuffled(5))
    assert len(batches) == len(stream) == 7 + 4
    assert [marks.shape[1] for _, marks in batches] == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    lost = torch.cat([samples[0] for samples, marks in batches if marks.shape[1]])
    kept = torch.cat([samples[0] for samples, marks in batches if not marks.shape[1]])
    assert sorted(lost[:6].tolist()) == [*range(6)] and len(lost) == 8 and sorted(kept.tolist()) == [*range(13)]
    assert [marks.shape[1] for _, marks in stream] == [marks.shape[1] for _, marks in batches]  # in the order of the data too


def test_a_single_sample_that_batchnorm_refuses():
    """A forget step that is silently left out would forget nothing."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)).double()
    with pytest.raises(InputError, match="^forget: BatchNorm needs two samples or more"):
        unlearn(model, small.pictures(1, seed=2), small.remain(), SFRon(tuning=TWO_EPOCHS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": -1}, "^threshold: must be a finite number of at least 0; found -1"),
        ({"forget_weight": float("inf")}, "^forget_weight: must be a finite number"),
        ({"smoothing": "a"}, "^smoothing: must be a finite number"),
        ({"max_norm": 0}, "^max_norm: must be a positive number; found 0"),
        ({"remain_steps": 0}, "^remain_steps: must be a whole number of at least 1; found 0"),
        ({"kind": "batch"}, "^kind: must be one of 'empirical', 'expected', 'loss-batch'; found 'batch'"),
        ({"tuning": None}, "^tuning: SFRon trains, and needs a Tuning; found None"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        SFRon(**settings)
