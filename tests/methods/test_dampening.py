"""SSD: the formula weight by weight, both importances, and what must not change."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from expunge.errors import InputError, NoEffectWarning
from expunge.methods import SSD
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET, REMAIN

every_network = pytest.mark.parametrize("name", small.NETWORKS)


def assert_dampened(model, changed, forget, everything, threshold, dampening):
    expected = reference.dampened(model, forget, everything, threshold, dampening)
    for name, value in changed.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name], rtol=1e-10, atol=0, msg=name)
    moved = sum(int((value != model.get_parameter(name)).sum()) for name, value in expected.items())
    assert 0 < moved < sum(value.numel() for value in expected.values())


@every_network
@pytest.mark.parametrize("kind", ["empirical", "expected"])
def test_the_formula_with_exact_fisher_information(name, kind):
    model = small.network(name)
    outcome = unlearn(model, small.forget(), small.remain(), SSD(1.2, 0.8, kind), batch_size=5)
    few, many = (reference.fisher(model, data.tensors, kind) for data in (small.forget(), small.remain()))
    forget = {name: total / FORGET for name, total in few.items()}
    everything = {name: (total + many[name]) / (FORGET + REMAIN) for name, total in few.items()}
    assert_dampened(model, outcome.model, forget, everything, 1.2, 0.8)
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def squares(model, data):
    """(∂ mean loss)² of each batch of 64, summed, and the number of batches."""
    model, totals = copy.deepcopy(model).eval(), {}
    batches = list(zip(*(tensor.split(64) for tensor in data.tensors), strict=True))
    for images, labels in batches:
        model.zero_grad()
        cross_entropy(model(images), labels).backward()
        for name, value in model.named_parameters():
            totals[name] = totals.get(name, 0) + value.grad**2
    return totals, len(batches)


@every_network
def test_as_released_squares_gradients_of_batches_of_64(name):
    model, forget, remain = small.network(name), small.pictures(70, seed=21), small.pictures(150, seed=22)
    outcome = unlearn(model, forget, remain, SSD.as_released(1.0, 0.7))
    (few, forget_batches), (many, remain_batches) = squares(model, forget), squares(model, remain)
    assert (forget_batches, remain_batches) == (2, 3)
    forget_mean = {name: total / 2 for name, total in few.items()}
    assert_dampened(model, outcome.model, forget_mean, {name: (few[name] + many[name]) / 5 for name in few}, 1.0, 0.7)


def by_class(samples, labels, seed):
    """Pictures of these classes, mixed."""
    found = small.pictures(samples, seed=seed)
    targets = torch.tensor(labels)[torch.randperm(samples, generator=torch.Generator().manual_seed(seed)) % len(labels)]
    return TensorDataset(found.tensors[0] + targets.reshape(-1, 1, 1, 1), targets)


def in_order(data):
    rows = data.tensors[1].argsort(stable=True)
    return TensorDataset(*(tensor[rows] for tensor in data.tensors))


@pytest.mark.parametrize("form", [lambda data: data, lambda data: Subset(data, range(len(data))), lambda data: list(data)])
def test_as_released_reads_classes_one_after_the_other(form):
    """The program's batches hold one class, and squares of their gradients are larger than those of mixed batches."""
    model, forget, remain = small.network("residual"), by_class(70, (2,), 21), by_class(150, (0, 1, 3), 22)
    (few, _), (many, _), (mixed, _) = squares(model, forget), squares(model, in_order(remain)), squares(model, remain)
    assert sum(many[name].sum() for name in many) > 1.5 * sum(mixed[name].sum() for name in mixed)
    outcome = unlearn(model, form(forget), form(remain), SSD.as_released(1.0, 0.7))
    forget_mean = {name: total / 2 for name, total in few.items()}
    assert_dampened(model, outcome.model, forget_mean, {name: (few[name] + many[name]) / 5 for name in few}, 1.0, 0.7)


class Ending(TensorDataset):
    """Ends early from some reading on."""

    left = 10_000

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return super().__getitem__(index)


@pytest.mark.parametrize("early", [10, 200])  # in the order of the labels; while these are read
def test_as_released_reads_all_of_the_data_or_raises(early):
    forget, remain = by_class(70, (2,), 21), Ending(*by_class(150, (0, 1, 3), 22).tensors)
    unlearn(small.network("residual"), forget, remain, SSD.as_released(1.0, 0.7), watch={})
    remain.left = Ending.left - remain.left - early
    with pytest.raises(InputError, match="^remain: must give every sample it promises"):
        unlearn(small.network("residual"), forget, remain, SSD.as_released(1.0, 0.7), watch={})


def test_as_released_takes_the_batches_of_a_loader_as_they_are():
    model, forget, remain = small.network("residual"), by_class(70, (2,), 21), by_class(150, (0, 1, 3), 22)
    (few, _), (many, _) = squares(model, forget), squares(model, remain)
    outcome = unlearn(model, DataLoader(forget, 64), DataLoader(remain, 64), SSD.as_released(1.0, 0.7))
    forget_mean = {name: total / 2 for name, total in few.items()}
    assert_dampened(model, outcome.model, forget_mean, {name: (few[name] + many[name]) / 5 for name in few}, 1.0, 0.7)


@pytest.mark.parametrize("method", [SSD(1e12), SSD.as_released(1e12)], ids=["exact", "as released"])
def test_a_huge_threshold_is_the_identity(method):
    model = cases.model()
    with pytest.warns(NoEffectWarning, match="nothing was dampened: no weight matters so much more"):
        outcome = unlearn(model, cases.forget(), cases.remain(), method)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())
    assert len(outcome.patch) == 0


def test_no_weight_grows_and_none_changes_sign():
    model = small.network("residual")
    changed = unlearn(model, small.forget(), small.remain(), SSD(threshold=0.5, dampening=0.9)).model
    assert any((after != before).any() for before, after in zip(model.parameters(), changed.parameters(), strict=True))
    for before, after in zip(model.parameters(), changed.parameters(), strict=True):
        assert (after.abs() <= before.abs()).all() and (after * before >= 0).all()


def test_weights_that_matter_to_the_forget_data_alone_go_to_zero():
    model, images = torch.nn.Linear(2, 2, bias=False).double(), torch.eye(2, dtype=torch.float64)
    forget, remain = (torch.utils.data.TensorDataset(images[row : row + 1], torch.tensor([row])) for row in (0, 1))
    changed = unlearn(model, forget, remain, SSD(threshold=1.5, dampening=0.0)).model
    assert (changed.weight[:, 0] == 0).all()
    assert torch.equal(changed.weight[:, 1], model.weight[:, 1])


def test_frozen_weights_stay():
    model = cases.model()
    outcome = unlearn(model, cases.forget(), cases.remain(), SSD(threshold=0.0, dampening=0.1))
    assert "0.bias" not in outcome.patch.edits and len(outcome.patch) > 0


def test_all_data_are_needed():
    with pytest.raises(InputError, match="^remain: SSD needs the data to keep"):
        unlearn(cases.model(), cases.forget(), method=SSD())


@pytest.mark.parametrize("argument", ["threshold", "dampening"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_bad_settings_are_named(argument, value):
    with pytest.raises(InputError, match=f"^{argument}: must be 0 or more"):
        SSD(**{argument: value})
