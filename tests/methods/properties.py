"""What must hold of every method, as named asserts."""

import random
from contextlib import contextmanager

import numpy
import torch
from torch import nn


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()],
        "hooks": [(len(module._forward_hooks), len(module._backward_hooks)) for module in model.modules()],
    }


@contextmanager
def assert_untouched(model: nn.Module):
    """Weights bit for bit, modes, flags, gradients, hooks and all random states are afterwards as before, whatever happens inside."""
    before = snapshot(model)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    try:
        yield
    finally:
        after = snapshot(model)
        assert_same_weights(before["weights"], after["weights"])
        for key in ("modes", "flags", "hooks"):
            assert before[key] == after[key], key
        for first, second in zip(before["gradients"], after["gradients"], strict=True):
            assert (first is None) == (second is None)
            assert first is None or torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]


def assert_same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_same_form(first: nn.Module, second: nn.Module) -> None:
    """Names, types, devices, modes and flags are kept."""
    assert type(first) is type(second)
    forms = [
        [(name, tensor.dtype, tensor.device, tensor.shape) for name, tensor in model.state_dict().items()] for model in (first, second)
    ]
    assert forms[0] == forms[1]
    assert [module.training for module in first.modules()] == [module.training for module in second.modules()]
    assert [parameter.requires_grad for parameter in first.parameters()] == [parameter.requires_grad for parameter in second.parameters()]


def assert_finite(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
