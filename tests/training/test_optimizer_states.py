"""An optimizer gets back what it kept, and nothing that it could not go on with."""

import copy

import pytest
import torch
from torch import nn

from expunge.training import optimizer_states

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "rate as a tensor": lambda parameters: torch.optim.SGD(parameters, torch.tensor(0.1), momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 0.1, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, 0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, 0.1),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, 0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, 0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 0.1),
    "groups": lambda parameters: torch.optim.SGD(
        [{"params": list(parameters)[:1]}, {"params": list(parameters)[1:], "momentum": 0.9}], 0.1, momentum=0
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def stepped(name: str, steps: int = 2):
    model = network()
    optimizer = OPTIMIZERS[name](tuple(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_come_back(name):
    _, first = stepped(name)
    model, second = stepped(name, steps=0)
    states = optimizer_states.read(second, *optimizer_states.parts(first))
    optimizer_states.restore(second, states)
    assert str(second.state_dict()["state"]) == str(first.state_dict()["state"])
    model(torch.ones(5, 3)).sum().backward()
    second.step()


WRONG = {
    "no such parameter": ("Adam", lambda tensors, numbers: tensors.update({"4/exp_avg": torch.zeros(2)}), "no place for '4/exp_avg'"),
    "a parameter below zero": ("Adam", lambda tensors, numbers: tensors.update({"-1/exp_avg": torch.zeros(2)}), "no place for"),
    "no number": ("Adam", lambda tensors, numbers: tensors.update({"one/exp_avg": torch.zeros(2)}), "no place for"),
    "no part": ("Adam", lambda tensors, numbers: tensors.update({"0/": torch.zeros(2)}), "no place for"),
    "a part missing": ("Adam", lambda tensors, numbers: tensors.pop("1/exp_avg"), "must keep .*'exp_avg', .*found"),
    "a part too many": ("momentum", lambda tensors, numbers: tensors.update({"0/more": torch.zeros(2)}), "must keep"),
    "another shape": ("momentum", lambda tensors, numbers: tensors.update({"0/momentum_buffer": torch.zeros(3, 4)}), r"of shape \(4, 3\)"),
    "whole numbers": ("momentum", lambda tensors, numbers: tensors.update({"0/momentum_buffer": torch.ones(4, 3).long()}), "type like"),
    "steps below zero": ("Adam", lambda tensors, numbers: tensors.update({"0/step": torch.tensor(-1.0)}), "not negative; found -1"),
    "steps without end": ("Adam", lambda tensors, numbers: tensors.update({"0/step": torch.tensor(float("nan"))}), "finite"),
    "a number for a tensor": ("Adam", lambda tensors, numbers: (tensors.pop("0/step"), numbers.update({"0/step": 1})), "must be a Tensor"),
    "text for a number": ("Adam", lambda tensors, numbers: numbers.update({"0/x": "text"}), "must be numbers by name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_could_not_go_on_with_is_refused(name):
    kind, change, message = WRONG[name]
    _, optimizer = stepped(kind)
    tensors, numbers = optimizer_states.parts(optimizer)
    change(tensors, numbers)
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer_states.read(optimizer, tensors, numbers)
    assert str(optimizer.state_dict()) == before


class Own(torch.optim.SGD):
    """Somebody's, which looks at its state itself."""

    __module__ = "somewhere"

    def load_state_dict(self, state_dict):
        self.state.clear()
        if "wrong" in state_dict["state"].get(0, {}):
            raise RuntimeError("not mine")
        super().load_state_dict(state_dict)


def test_an_optimizer_of_one_s_own_that_refuses_is_as_it_was():
    model = network()
    optimizer = Own(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    states = optimizer_states.read(optimizer, {"0/wrong": torch.zeros(7)}, {})
    with pytest.raises(ValueError, match="Own does not take its state .*not mine"):
        optimizer_states.restore(optimizer, states)
    assert str(optimizer.state_dict()) == str(before)
