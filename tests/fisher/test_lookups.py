"""The squares of tables as a GPU computes them, without waiting for a number of pairs, are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from expunge.fisher import diagonal
from expunge.fisher.closed_forms import shared
from expunge.fisher.closed_forms.shared import Pairs, Slots
from tests import reference
from tests.fisher.cases import MODELS, build

SHAPES = [(5, 7, 6, 3), (1, 1, 4, 2), (4, 9, 3, 5), (3, 1, 2, 2)]  # samples, positions, rows of the table, width


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_equal_pairs(shape):
    torch.manual_seed(0)
    samples, positions, count, width = shape
    indices, gradients = torch.randint(count, (samples, positions)), torch.randn(samples, positions, width).double()
    first, second = torch.randn(samples, 6, count).double(), torch.randn(samples, 6, width).double()
    pairs, slots = (kind.of(indices, gradients, count) for kind in (Pairs, Slots))
    assert torch.allclose(slots.squares(), pairs.squares(), rtol=1e-13, atol=0)
    assert torch.allclose(slots.beside(first, second), pairs.beside(first, second), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in MODELS if "embedding" in name or "tied" in name])
def test_models_with_tables(name, monkeypatch):
    monkeypatch.setattr(shared, "Pairs", Slots)
    model, batch = build(name)
    assert reference.worst_error(diagonal(model, [batch]).sums, reference.fisher(model, batch)) <= 1e-10
