"""MSG: which weights are renewed, the training equal to a plain loop, and models of other forms."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge.errors import InputError, ModelError
from expunge.methods import MSG
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import REMAIN, SIZE, TWO_EPOCHS

every_network = pytest.mark.parametrize("name", small.NETWORKS)


def mean_gradient(model, data):
    """Σ_n ∇ℓ_n / n, one sample at a time."""
    model = copy.deepcopy(model).eval()
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for image, label in data:
        model.zero_grad()
        cross_entropy(model(image[None]), label[None]).backward()
        for name, value in model.named_parameters():
            totals[name] += value.grad / len(data)
    return totals


def convolutions(model):
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


def smallest(model, names, ratio):
    """True for the share of each of these weights with the smallest distance between the gradients."""
    forget, remain = mean_gradient(model, small.forget()), mean_gradient(model, small.remain())
    chosen = {}
    for name in names:
        gap = (remain[name] - forget[name]).abs()
        count = int(ratio * gap.numel() + 0.5)
        chosen[name] = gap <= gap.flatten().sort().values[count - 1] if count else torch.zeros_like(gap, dtype=torch.bool)
    return chosen


def constant(name):
    """The network with 0.25 for every weight."""

    def build():
        network = small.network(name)
        nn.utils.vector_to_parameters(torch.full_like(nn.utils.parameters_to_vector(network.parameters()), 0.25), network.parameters())
        return network

    return build


def renewed(model, mask):
    model = copy.deepcopy(model)
    for name, part in mask.items():
        model.get_parameter(name).data[part] = 0.25
    return model


@every_network
def test_the_smallest_gaps_of_each_convolution_are_renewed_and_nothing_else(name):
    model = small.network(name)
    outcome = unlearn(model, small.forget(), small.remain(), MSG(0.3, tuning=None, fresh=constant(name)), batch_size=5)
    mask = smallest(model, convolutions(model), 0.3)
    properties.assert_same_weights(renewed(model, mask).state_dict(), outcome.model.state_dict())
    assert 0 < sum(int(part.sum()) for part in mask.values()) < sum(part.numel() for part in mask.values())
    outcome.edit.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


@every_network
def test_the_training_is_the_plain_loop_with_a_smaller_step_for_what_was_kept(name):
    model, remain = small.network(name), small.remain()
    method = MSG(0.3, kept_rate=0.1, tuning=TWO_EPOCHS, fresh=constant(name))
    outcome = unlearn(model, small.forget(), remain, method)
    mask = smallest(model, convolutions(model), 0.3)
    expected = renewed(model, mask).train()
    velocity = {name: torch.zeros_like(value) for name, value in expected.named_parameters()}
    for epoch in range(2):
        for rows in reference.cut(REMAIN, SIZE, seed=3 + epoch):
            expected.zero_grad()
            cross_entropy(expected(remain.tensors[0][rows]), remain.tensors[1][rows]).backward()
            for key, value in expected.named_parameters():
                velocity[key] = 0.9 * velocity[key] + value.grad + 0.01 * value.detach()
                share = torch.ones_like(value).masked_fill(~mask[key], 0.1) if key in mask else 1.0
                value.data -= share * 0.02 * velocity[key]
    small.assert_close(outcome.model, expected, model)


def test_fresh_values_are_those_of_the_seed():
    model = small.network("residual")
    mask = smallest(model, convolutions(model), 0.3)
    first, again, other = (unlearn(model, small.forget(), small.remain(), MSG(seed=seed, tuning=None)).model for seed in (0, 0, 1))
    properties.assert_same_weights(first.state_dict(), again.state_dict())
    for name, part in mask.items():
        before, one, two = (network.get_parameter(name) for network in (model, first, other))
        assert (one[part] != before[part]).all() and (one[part] != two[part]).all() and torch.equal(one[~part], before[~part])
        fan_in = before[0].numel()
        assert one[part].abs().max() <= fan_in**-0.5  # torch's own range for a convolution


def test_without_convolutions_it_is_the_matrices_but_the_classifiers():
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, small.CLASSES)).double()
    outcome = unlearn(model, small.forget(), small.remain(), MSG(0.25, tuning=None))
    assert {name: int(part.sum()) for name, part in outcome.edit.mask(model).items() if part.any()} == {"1.weight": 128}
    with pytest.raises(ModelError, match="no parameter is left to mask; left out: 1.weight .head., 1.bias .head."):
        unlearn(nn.Sequential(nn.Flatten(), nn.Linear(64, small.CLASSES)).double(), small.forget(), small.remain(), MSG())


def test_a_frozen_convolution_stays():
    model = small.network("residual")
    first = next(name for name, _ in model.named_parameters())
    model.get_parameter(first).requires_grad_(False)
    method = MSG(tuning=Tuning(Constant(0.01, 1), batch_size=SIZE))
    changed = unlearn(model, small.forget(), small.remain(), method).model
    assert torch.equal(changed.get_parameter(first), model.get_parameter(first))


def test_a_kept_rate_of_zero_moves_no_kept_weight_of_a_convolution():
    model = small.network("residual")
    changed = unlearn(model, small.forget(), small.remain(), MSG(kept_rate=0.0, tuning=TWO_EPOCHS)).model
    for name, part in smallest(model, convolutions(model), 0.3).items():
        before, after = model.get_parameter(name), changed.get_parameter(name)
        assert torch.equal(before[~part], after[~part]) and (before[part] != after[part]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 1.0}, r"^ratio: must be in \[0, 1\); found 1"),
        ({"kept_rate": 1.5}, r"^kept_rate: must be in \[0, 1\]; found 1.5"),
        ({"seed": 0.5}, "^seed: must be an integer"),
        ({"tuning": 5}, "^tuning: must be a Tuning, or None for no training; found 5"),
        ({"fresh": 3}, "^fresh: must be a function"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        MSG(**settings)


def test_remain_data_are_needed_to_choose_too():
    with pytest.raises(InputError, match="^remain: MSG needs the data to keep; pass remain data"):
        unlearn(cases.model(), cases.forget(), None, MSG(tuning=None))
