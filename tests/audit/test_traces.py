"""Scores of planted samples: the program of one-run auditing, gradients by a loop, networks that know and that do not."""

from __future__ import annotations

import copy
import math

import numpy
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from expunge.audit.intervals import clopper_pearson
from expunge.audit.planting import add_noise, flip_coins, swap_labels
from expunge.audit.traces import confusion, noise_trace, one_run_epsilon
from expunge.errors import DivergedError, InputError


def plain(samples=80, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 30, generator=numbers), torch.arange(samples) % 4)


def test_confusion_counts_the_two_classes_alone():
    labels = torch.tensor([1, 1, 1, 3, 3, 0, 2])
    predicted = torch.tensor([3, 1, 0, 1, 3, 3, 1])
    assert confusion(nn.functional.one_hot(predicted).float(), labels, 1, 3) == clopper_pearson(2, 5)
    with pytest.raises(InputError, match="second: must be another class than first; found 5"):
        confusion(torch.zeros(7, 4), labels, 5, 5)
    with pytest.raises(InputError, match="labels: must hold samples of the classes 5 and 6"):
        confusion(torch.zeros(7, 4), labels, 5, 6)
    with pytest.raises(InputError, match="labels: .* found none of 5"):
        confusion(torch.zeros(7, 4), labels, 1, 5)
    with pytest.raises(InputError, match="labels: must be one for each row of logits"):
        confusion(torch.zeros(6, 4), labels, 1, 3)
    with pytest.raises(DivergedError):
        confusion(torch.full((7, 4), math.nan), labels, 1, 3)


def trained(dataset, steps=150):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    images, labels = (torch.stack(part) for part in zip(*(dataset[index] for index in range(len(dataset))), strict=True))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def test_the_trace_of_noise_is_the_mean_of_aligned_gradients():
    dataset = plain()
    _, key = add_noise(dataset, 0.5, 0.3)
    model = trained(dataset, 5)
    model[0].weight.requires_grad_(False)
    before, mode, numbers = copy.deepcopy(model.state_dict()), model.training, torch.get_rng_state()
    trace = noise_trace(model, dataset, key, batch_size=7)
    assert model.training is mode and torch.equal(numbers, torch.get_rng_state()) and not model[0].weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    scores = []
    for row, noise in zip(key.rows.tolist(), key.noise, strict=True):
        image, label = dataset[row]
        image = image.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(image[None]), label[None]), image)
        scores.append(float(noise @ gradient / (0.3 * gradient.norm())))
    assert trace.mean.value == pytest.approx(numpy.mean(scores), abs=1e-5)
    assert trace.beyond.value == numpy.mean([score < stats.norm.ppf(0.01) for score in scores])


def test_noise_shows_in_a_network_trained_on_it_and_in_no_other():
    dataset = plain(200)
    planted, key = add_noise(dataset, 0.5, 1.0)
    seen, unseen = noise_trace(trained(planted), dataset, key), noise_trace(trained(dataset), dataset, key)
    assert seen.mean.high < 0 and seen.beyond.low > 0.01
    assert 0 in unseen.mean and 0.01 in unseen.beyond


def program_probability(m, r, v, eps, delta):
    """p_value_DP_audit of the paper's appendix D."""
    q = 1 / (1 + math.exp(-eps))
    beta, alpha, total = stats.binom.sf(v - 1, r, q), 0.0, 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return min(beta + alpha * delta * 2 * m, 1)


def program_epsilon(m, r, v, delta, p):
    low, high = 0.0, 1.0
    while program_probability(m, r, v, high, delta) < p:
        high += 1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if program_probability(m, r, v, middle, delta) < p else (low, middle)
    return low


@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.parametrize("strength", [0.0, 1.0, 5.0])
def test_one_run_epsilon_is_the_programs(delta, strength):
    _, key = flip_coins(plain(150), 120, seed=1)
    scores = torch.randn(120, generator=torch.Generator().manual_seed(2)) + strength * key.included
    run = one_run_epsilon(key, scores, [60], delta)
    order = scores.argsort(descending=True).tolist()
    right = sum(bool(key.included[index]) for index in order[:30]) + sum(not key.included[index] for index in order[-30:])
    assert run.epsilon == pytest.approx(program_epsilon(120, 60, right, delta, 0.05), abs=1e-6)
    assert run.accuracy == clopper_pearson(right, 60) and run.guesses == 60


def test_several_numbers_of_guesses_share_the_error():
    _, key = flip_coins(plain(400), 400, seed=1)
    scores = 10.0 * key.included
    alone, one_of_four = one_run_epsilon(key, scores, [200]), one_run_epsilon(key, scores)
    assert one_of_four.guesses == 200 and alone.epsilon > one_of_four.epsilon > 2


def test_a_bound_holds_where_nothing_was_learned():
    """ε above 0 in at most 5 % of networks that know nothing; 200 of them have a deviation of 1.5 points."""
    found = 0
    for seed in range(200):
        _, key = flip_coins(plain(100), 100, seed)
        found += one_run_epsilon(key, torch.randn(100, generator=torch.Generator().manual_seed(seed))).epsilon > 0
    assert found <= 17


def test_all_of_the_canaries_told_is_a_large_epsilon():
    _, key = flip_coins(plain(400), 400)
    half = min(int(key.included.sum()), int((~key.included).sum()))
    run = one_run_epsilon(key, key.included.float(), [2 * half], delta=0.0)
    assert run.accuracy.value == 1 and run.epsilon == pytest.approx(-math.log(0.05 ** (-1 / (2 * half)) - 1), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: noise_trace(nn.Linear(30, 4), plain(), flip_coins(plain(), 4)[1]),
            "key: .* found coins, 80 samples",
        ),
        (lambda: noise_trace(nn.Linear(30, 4), plain(9), add_noise(plain(), 0.5, 1.0)[1]), "key: must be that of noise planted in this"),
        (lambda: one_run_epsilon(swap_labels(plain(), 0, 1)[1], torch.zeros(40)), "scores: must be one for each canary of a key of coins"),
        (lambda: one_run_epsilon(flip_coins(plain(), 40)[1], torch.zeros(39)), "scores: .* found 39"),
        (lambda: one_run_epsilon(flip_coins(plain(), 40)[1], torch.zeros(40), [41]), "guesses"),
        (lambda: one_run_epsilon(flip_coins(plain(), 40)[1], torch.zeros(40), []), "guesses: must be one number or more"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
