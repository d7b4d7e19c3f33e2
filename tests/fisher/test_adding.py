"""Sums in one memory, as on a GPU, equal sums of each parameter by itself."""

from __future__ import annotations

import pytest
import torch

from expunge.fisher import adding
from expunge.fisher.adding import Sums


def squares(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return {
        "plain": torch.rand(3, 4, generator=generator),
        "permuted": torch.rand(2, 5, 3, generator=generator).permute(2, 0, 1),
        "part": torch.rand(40, generator=generator)[7:19].view(3, 4),
        "vector": torch.rand(6, generator=generator),
    }


@pytest.mark.parametrize("places", [(), ("cpu",)])
def test_adds_in_any_memory_order(places, monkeypatch):
    monkeypatch.setattr(adding, "JOINED_ON", places)
    sums, batches = Sums(), [squares(seed) for seed in range(4)]
    for batch in batches:
        sums.add(batch)
    for name in batches[0]:
        expected = sum(batch[name].double() for batch in batches)
        assert torch.equal(sums[name], expected) and sums[name].dtype == torch.float64
    assert (sums._joined is not None) == bool(places) and not sums.not_finite()


def test_another_form_is_added_too(monkeypatch):
    monkeypatch.setattr(adding, "JOINED_ON", ("cpu",))
    sums, one, other = Sums(), squares(0), squares(1)
    sums.add(one)
    sums.add({name: square.clone(memory_format=torch.contiguous_format) for name, square in other.items()} | {"new": torch.ones(2)})
    assert torch.equal(sums["permuted"], one["permuted"].double() + other["permuted"].double()) and sums["new"].tolist() == [1, 1]
    sums.add({"new": torch.tensor([1.0, torch.inf])})
    assert sums.not_finite() == ["new"]
    sums["plain"][0, 0] = torch.nan
    assert sums.not_finite() == ["plain", "new"]
    sums.clear()
    assert not sums
    sums.add(one)
    assert torch.equal(sums["part"], one["part"].double())


@pytest.mark.parametrize("change", [lambda tensor: tensor.expand(3, 4), lambda tensor: tensor.expand(3, 4).clone()[:, ::2]])
def test_tensors_with_gaps_are_added_one_by_one(change, monkeypatch):
    monkeypatch.setattr(adding, "JOINED_ON", ("cpu",))
    sums, value = Sums(), change(torch.rand(4))
    for _ in range(2):
        sums.add({"gaps": value})
    assert sums._joined is None and torch.equal(sums["gaps"], 2 * value.double())
