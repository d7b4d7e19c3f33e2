"""Sums of absolute gradients: equal to a loop over single samples, however the data are cut."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge import fisher
from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.methods.label_free_dampening import norms, squared_norms
from tests import reference
from tests.methods import properties, small

SIZES = {2: Objective(losses=squared_norms, classes=False), 1: Objective(losses=norms, classes=False)}


class Branching(nn.Module):
    """What vmap cannot follow: a branch by the data. One weight is used twice, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head, self.unused = nn.Linear(64, 64), nn.Linear(64, 4), nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.shared(x.flatten(1))
        return self.head(self.shared(x) if float(x.detach().sum()) > 0 else x)


def branching() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        return Branching().double()


NETWORKS = {**{name: lambda name=name: small.network(name) for name in small.NETWORKS}, "a branch by the data": branching}


@pytest.mark.parametrize("power", SIZES)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [1, 5])
def test_absolute_gradients_of_single_samples(name, power, size):
    # Single samples where a batch decides the branch for all of its samples.
    model, data = NETWORKS[name](), small.remain()
    size = 1 if name == "a branch by the data" else size
    with properties.assert_untouched(model):
        sums = fisher.absolute(model, list(zip(*(tensor.split(size) for tensor in data.tensors), strict=True)), SIZES[power])
    assert (sums.count, sums.kind) == (len(data), "absolute")
    expected = reference.absolute_gradients(model, data.tensors[0], power)
    assert sums.sums.keys() == expected.keys() and any(bool(total.any()) for total in expected.values())
    for parameter, total in sums.sums.items():
        torch.testing.assert_close(total, expected[parameter], rtol=1e-9, atol=1e-12, msg=parameter)


def test_it_is_not_the_absolute_value_of_a_sum():
    model, (images, _) = small.network("no BatchNorm"), small.remain().tensors
    whole = torch.autograd.grad(model(images).square().sum(), model[0].weight)[0].abs()
    assert (fisher.absolute(model, small.remain(), SIZES[2]).sums["0.weight"] > 1.01 * whole).any()


class Looping(nn.Module):
    """`.item()` raises under vmap, and depends on nothing else: batches may be of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small.network("no BatchNorm")

    def forward(self, x):
        assert x.detach().sum().item() < 1e9
        return self.inner(x)


def test_what_torch_func_cannot_do_goes_one_sample_at_a_time():
    found, expected = (fisher.absolute(model, small.remain(), SIZES[1]).sums for model in (Looping(), small.network("no BatchNorm")))
    for name, total in expected.items():
        torch.testing.assert_close(found[f"inner.{name}"], total, rtol=1e-9, atol=1e-12)


def test_the_norm_has_no_slope_at_zero():
    model = nn.Linear(3, 2).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    sums = fisher.absolute(model, TensorDataset(torch.randn(5, 3).double(), torch.zeros(5)), SIZES[1])
    assert not any(bool(total.any()) for total in sums.sums.values())


def test_frozen_parameters_take_no_part_and_some_must_be_left():
    model = small.network("no BatchNorm")
    model[0].requires_grad_(False)
    assert {*fisher.absolute(model, small.forget(), SIZES[1]).sums} == {"3.weight", "3.bias"}
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        fisher.absolute(model.requires_grad_(False), small.forget(), SIZES[1])


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small.network("no BatchNorm")

    def forward(self, x):
        return self.inner(x - x.mean(0))


def test_samples_that_depend_on_each_other_are_refused():
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        fisher.absolute(Centred(), small.remain(), SIZES[1])


def test_gradients_that_are_not_finite_are_refused():
    data = TensorDataset(torch.full((4, 3), 1e30), torch.zeros(4))  # outputs that float32 holds, and gradients that it does not
    with pytest.raises(ModelError, match="the gradients of weight must be finite"):
        fisher.absolute(nn.Linear(3, 2), data, SIZES[2])


class Mixed(nn.Module):
    """torch.func mixes up the samples of gradients behind a PReLU, but not those of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slope, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.PReLU(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.slope(self.layer(x)).amax((2, 3)))


@pytest.mark.parametrize("cuts", [[2, 2, 8], [12], [1] * 12])
def test_zeros_at_first_show_nothing(cuts):
    torch.manual_seed(0)
    model, x, y = Mixed().double().eval(), torch.randn(12, 6, 4, 3).double(), torch.randint(0, 4, (12,))
    x[:3] = 0
    totals = fisher.absolute_values.absolute(model, list(zip(x.split(cuts), y.split(cuts), strict=True)), SIZES[2]).sums
    assert reference.worst_error(totals, reference.absolute_gradients(model, x, 2)) <= 1e-10


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_a_coupling_that_the_first_samples_hide_is_refused():
    x = torch.randn(20, 5).double()
    x[:10] = 0
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        fisher.absolute_values.absolute(Shifted(5, 4).double(), [(part, torch.zeros(10).long()) for part in x.split(10)], SIZES[2])


def test_a_batch_that_does_not_fit_is_split():
    model, (x, y) = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), (torch.randn(7, 3).double(), torch.zeros(7))
    sizes, whole = [], SIZES[2].outputs

    def outputs(model, batch):
        sizes.append(len(batch[0]))
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(model, batch)

    found = fisher.absolute(model, [(x, y)] * 3, Objective(outputs=outputs, losses=squared_norms, classes=False))
    assert found.count == 21 and sizes.count(7) == 1  # what did not fit once is not tried again
    expected = {name: 3 * total for name, total in reference.absolute_gradients(model, x, 2).items()}
    assert reference.worst_error(found.sums, expected) <= 1e-12
    with pytest.raises(torch.OutOfMemoryError):
        fisher.absolute(model, [(x, y)], Objective(outputs=lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))))


def test_a_gradient_that_no_single_sample_has_is_not_added(monkeypatch):
    """torch.func may make one up that plain passes do not have; the parameter goes one sample at a time then."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.zeros(40, 3).double()
    true = fisher.absolute_values.batched

    def made_up(model, names, *rest):
        sizes = true(model, names, *rest)
        return sizes | ({"0.weight": sizes["0.weight"] + 1} if "0.weight" in names else {})

    monkeypatch.setattr(fisher.absolute_values, "batched", made_up)
    found = fisher.absolute(model, [(part, torch.zeros(20)) for part in x.split(20)], SIZES[2]).sums
    assert not found["0.weight"].any()
    assert reference.worst_error(found, reference.absolute_gradients(model, x, 2)) <= 1e-10


def test_refused_clearly():
    model, (x, y) = nn.Linear(5, 4), (torch.randn(6, 5), torch.randint(0, 4, (6,)))
    with pytest.raises(InputError, match="objective: must be an Objective"):
        fisher.absolute(model, [(x, y)], nn.functional.cross_entropy)
    with pytest.raises(InputError, match="model: must be a torch.nn.Module"):
        fisher.absolute(model.weight, [(x, y)])
    with pytest.raises(ModelError, match="call the model once on a batch first"):
        fisher.absolute(nn.LazyLinear(4), [(x, y)])
    with pytest.raises(InputError, match="tensors must be dense"):
        fisher.absolute(model, [(x.to_sparse(), y)])
    with pytest.raises(InputError, match="inputs and targets must be finite"):
        fisher.absolute(model, [(x * torch.nan, y)])


class Later(nn.Module):
    """From a second batch with wider rows on it takes a branch that torch.func cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)

    def forward(self, x):
        return self.inner(x if x.shape[1] == 5 else torch.stack([row[:5] * (2 if float(row[0]) > 0 else 1) for row in x]))


def test_torch_func_may_fail_on_a_later_batch():
    torch.manual_seed(0)
    model, first, later = Later().double().eval(), torch.randn(4, 5).double(), torch.randn(3, 6).double()
    totals = fisher.absolute(model, [(first, torch.zeros(4)), (later, torch.zeros(3))], SIZES[2]).sums
    parts = [reference.absolute_gradients(model, x, 2) for x in (first, later)]
    assert reference.worst_error(totals, {name: parts[0][name] + parts[1][name] for name in totals}) <= 1e-10
