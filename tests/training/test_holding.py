"""Frozen weights against a loop that zeroes by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from expunge.editing import masks
from expunge.errors import InputError
from expunge.training import holding


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "momentum and decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "nesterov, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, foreach=False),
    "adam, amsgrad, foreach": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True, weight_decay=0.01),
}


def trained_before(build: Build) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """A model with an optimizer whose momentum is already moving, data, and a mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    optimizer = build(list(model.parameters()))
    batches = [(torch.randn(8, 2, 4, 4), torch.randint(3, (8,))) for _ in range(5)]
    for batch in batches:
        backward(model, optimizer, batch)
        optimizer.step()
    score = {name: torch.rand(parameter.shape) for name, parameter in model.named_parameters()}
    return model, optimizer, batches, masks.select(score, 0.4)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_frozen_weights_stay_zero_and_others_move_as_if_alone(case: str, clip: float | None) -> None:
    model, optimizer, batches, mask = trained_before(OPTIMIZERS[case])
    by_hand, its_optimizer, _, _ = trained_before(OPTIMIZERS[case])

    def zero() -> None:
        with torch.no_grad():
            for name, parameter in by_hand.named_parameters():
                state = [value for value in its_optimizer.state[parameter].values() if isinstance(value, Tensor)]
                for tensor in [parameter, parameter.grad, *state]:
                    if tensor is not None and tensor.shape == parameter.shape:
                        tensor[mask[name]] = 0

    zero()
    with holding.freeze(model, mask, optimizer):
        for batch in batches:
            backward(model, optimizer, batch)
            backward(by_hand, its_optimizer, batch)
            zero()
            if clip is not None:
                norms = [float(torch.nn.utils.clip_grad_norm_(each.parameters(), clip)) for each in (model, by_hand)]
                assert norms[0] == norms[1] > clip
            optimizer.step()
            its_optimizer.step()
            zero()
            for name, parameter in model.named_parameters():
                assert (parameter[mask[name]] == 0).all() and not torch.signbit(parameter[mask[name]]).any()
                assert (parameter.grad[mask[name]] == 0).all()
                for key, value in optimizer.state[parameter].items():
                    if key != "step":
                        assert (value[mask[name]] == 0).all()
    for left, right in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(left, right)
        states = [(value, its_optimizer.state[right][key]) for key, value in optimizer.state[left].items()]
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(other)) for value, other in states)


def test_freeze_matters() -> None:
    model, optimizer, batches, mask = trained_before(OPTIMIZERS["momentum and decay"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter[mask[name]] = 0
    for batch in batches:
        backward(model, optimizer, batch)
        optimizer.step()
    assert all((parameter[mask[name]] != 0).any() for name, parameter in model.named_parameters() if mask[name].any())


@pytest.mark.parametrize("fails", [False, True])
def test_freeze_ends(fails: bool) -> None:
    model, optimizer, batches, mask = trained_before(OPTIMIZERS["adam"])
    try:
        with holding.freeze(model, mask, optimizer):
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    weight = model[0].weight
    assert (weight[mask["0.weight"]] == 0).all()
    backward(model, optimizer, batches[0])
    assert (weight.grad[mask["0.weight"]] != 0).any()
    optimizer.step()
    assert (weight[mask["0.weight"]] != 0).any()
    assert not optimizer._optimizer_step_post_hooks and not weight._backward_hooks


def test_freeze_clears_gradients_already_there_and_keeps_step_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    mask = {"0.weight": torch.tensor([[True, False], [False, False]]), "scale": torch.tensor(True)}
    for _ in range(3):
        (model(torch.ones(1, 2)).sum() * model.scale).backward()
        optimizer.step()
    with holding.freeze(model, mask, optimizer):
        assert model[0].weight.grad[0, 0] == 0 and model[0].weight.grad[0, 1] != 0
        optimizer.step()
        assert model.scale == 0 and optimizer.state[model.scale]["step"] == 4


def test_freeze_of_frozen_parameters_and_refusals() -> None:
    model = copy.deepcopy(small_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[0].weight.requires_grad_(False)
    with holding.freeze(model, {"0.weight": torch.ones(4, 2, 3, 3, dtype=torch.bool)}, optimizer):
        assert (model[0].weight == 0).all()
    refused = {
        "must name parameters of the model; found 9.weight": {"9.weight": torch.ones(1, dtype=torch.bool)},
        r"0.bias must be torch.bool of shape \(4,\); found torch.bool of shape \(5,\)": {"0.bias": torch.ones(5, dtype=torch.bool)},
        r"0.bias must be torch.bool of shape \(4,\); found torch.float32": {"0.bias": torch.ones(4)},
    }
    for rule, mask in refused.items():
        with pytest.raises(InputError, match=rule), holding.freeze(model, mask, optimizer):
            pass
    model[4].bias = nn.Parameter(torch.zeros(4))
    model[0].bias = model[4].bias
    both = {name: torch.ones(4, dtype=torch.bool) for name in ("0.bias", "4.bias")}
    with pytest.raises(InputError, match="must name a shared parameter once"), holding.freeze(model, both, optimizer):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_frozen_weights_stay_zero_on_cuda(case: str) -> None:
    model, _, batches, mask = trained_before(OPTIMIZERS[case])
    model.cuda()
    optimizer = OPTIMIZERS[case](list(model.parameters()))
    with holding.freeze(model, mask, optimizer):
        for inputs, targets in batches:
            backward(model, optimizer, (inputs.cuda(), targets.cuda()))
            optimizer.step()
            assert all((parameter.cpu()[mask[name]] == 0).all() for name, parameter in model.named_parameters())


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_slow_weights_move_by_a_share_of_every_step(case: str) -> None:
    model, optimizer, batches, mask = trained_before(OPTIMIZERS[case])
    by_hand, its_optimizer, _, _ = trained_before(OPTIMIZERS[case])
    with holding.slow(model, mask, 0.1, optimizer):
        for batch in batches:
            backward(model, optimizer, batch)
            optimizer.step()
    for batch in batches:
        before = copy.deepcopy(by_hand)
        backward(by_hand, its_optimizer, batch)
        its_optimizer.step()
        with torch.no_grad():
            for name, parameter in by_hand.named_parameters():
                old = before.get_parameter(name)
                parameter[mask[name]] = (old + 0.1 * (parameter - old))[mask[name]]
    for found, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    before = copy.deepcopy(model)
    backward(model, optimizer, batches[0])  # outside all steps are whole again
    backward(by_hand, its_optimizer, batches[0])
    optimizer.step(), its_optimizer.step()
    for found, expected, old in zip(model.parameters(), by_hand.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
        assert not torch.equal(found, old)
