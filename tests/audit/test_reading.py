"""What is read of a network equals a loop over single samples, once per sample, and leaves the network as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge.audit.features import LAST
from expunge.audit.reading import check_alike, read
from expunge.errors import DivergedError, InputError
from tests.audit.small import CLASSES, Filter, clouds, fresh, parts, trained


def sets() -> dict:
    return dict(zip(("forget", "remain", "test"), parts(), strict=True))


def test_every_number_is_that_of_a_loop():
    model = trained(0).double()
    data = TensorDataset(clouds(50, 3).tensors[0].double(), clouds(50, 3).tensors[1])
    part = read(model, {"forget": data}, batch_size=7)["forget"]
    model.float()
    reference = trained(0).double()
    sums = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    for number, (x, y) in enumerate(data):
        with torch.no_grad():
            p = reference(x[None]).softmax(1)[0]
        sums[int(y)] += p
        assert part.predicted[number] == p.argmax()
        assert part.losses[number] == pytest.approx(-float(p[y].log()), rel=1e-9, abs=1e-12)
        assert part.signals[number] == pytest.approx(float(p[y].log() - (p.sum() - p[y]).log()), rel=1e-6)
        hidden = reference[:4](x[None])[0]
        assert torch.allclose(part.features[LAST][number], hidden.float(), atol=1e-6)
    reference.float()
    assert torch.allclose(part.outputs * part.counts[:, None], sums, atol=1e-9)


def test_each_sample_is_read_once_and_a_bounded_number_is_kept():
    class Counted(TensorDataset):
        seen = 0

        def __getitem__(self, index):
            Counted.seen += 1
            return super().__getitem__(index)

    data = Counted(*clouds(100, 3).tensors)
    model = trained(0)
    part = read(model, {"forget": data}, batch_size=16, sample=30)["forget"]
    assert Counted.seen <= 100 + 16  # and a first batch, to see where the stages are
    assert len(part.losses) == 100 and len(part.logits) == len(part.rows) == len(part.features[LAST]) == 30
    with torch.no_grad():
        assert torch.allclose(part.logits, model(data.tensors[0][part.rows]), atol=1e-6)
    other = read(trained(1), {"forget": data}, batch_size=16, sample=30)["forget"]
    assert torch.equal(part.rows, other.rows) and len(part.rows.unique()) == 30


def test_the_network_and_all_random_states_stay_as_they_are():
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).train()
    model[3].eval()
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    read(model, sets())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    assert model[1].training and not model[3].training and torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_wrapper_has_the_places_of_what_it_wraps():
    inner, wrapped = read(trained(0), sets()), read(Filter(trained(0)), sets())
    assert torch.equal(inner["test"].features[LAST], wrapped["test"].features[LAST])
    assert (wrapped["forget"].predicted != wrapped["forget"].labels).all()


def test_data_that_change_are_refused():
    data = clouds(60, 3)
    loader = DataLoader(data, 10, shuffle=True, generator=torch.Generator().manual_seed(3))
    first, second = (read(trained(0), {"forget": loader}) for _ in range(2))
    with pytest.raises(InputError, match="forget: must give the same samples in the same order"):
        check_alike(first, second, "after")
    wide = nn.Linear(12, CLASSES + 1)
    with pytest.raises(InputError, match="after: must have as many classes as the original network, 4; found 5"):
        check_alike(read(trained(0), {"forget": data}), read(wide, {"forget": data}), "after")


def test_a_network_that_diverged_is_named():
    model = fresh(0)
    with torch.no_grad():
        model[4].bias[1] = torch.nan
    with pytest.raises(DivergedError, match="after: its logits on forget are no numbers"):
        read(model, sets(), argument="after")
