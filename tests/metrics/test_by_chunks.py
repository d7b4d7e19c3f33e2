"""Measures by chunks, in one process: those of `accuracy` and `mean_loss`. Several processes: tests/fisher/test_chunks_shared.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge import metrics
from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError


def case() -> tuple[nn.Module, TensorDataset]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Linear(6, 3), TensorDataset(torch.randn(203, 6), torch.randint(0, 3, (203,)))


def test_accuracy_and_loss_are_those_of_the_whole():
    model, data = case()
    measured = metrics.by_chunks(model, data, batch_size=16, batches_per_chunk=2)
    assert (measured.samples, measured.labels) == (203, 203) and measured.accuracy == metrics.accuracy(model, data)
    assert measured.mean_loss == pytest.approx(metrics.mean_loss(metrics.logits(model, data)), rel=1e-12)
    assert model.training


def test_labels_that_are_ignored_do_not_count():
    model, data = case()
    labels = torch.stack([data.tensors[1]] * 2, 1)
    labels[:100, 1] = -100
    words = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (3, 2)))
    measured = metrics.by_chunks(words, TensorDataset(data.tensors[0], labels))
    assert (measured.labels, measured.samples) == (306, 203)
    assert measured.accuracy == metrics.accuracy(words, TensorDataset(data.tensors[0], labels))


def test_losses_without_classes():
    model, data = case()
    regression = TensorDataset(data.tensors[0], torch.randn(203, 3))
    squares = Objective(losses=lambda outputs, targets: (outputs - targets).square().sum(1), classes=False)
    measured = metrics.by_chunks(model, regression, squares)
    inputs, targets = regression.tensors
    expected = (model(inputs) - targets).square().sum(1).mean().item()
    assert measured.mean_loss == pytest.approx(expected, rel=1e-6)
    with pytest.raises(InputError, match="at least one label"):
        _ = measured.accuracy


def test_a_model_that_diverged_is_not_measured():
    model, data = case()
    model.bias.data[1] = torch.nan
    with pytest.raises(DivergedError, match="NaN in 203 of 203 rows"):
        metrics.by_chunks(model, data)
