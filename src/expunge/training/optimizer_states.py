"""Turn the state of an optimizer into tensors and numbers by name, and back, checked before anything is changed."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PROBE = (2, 3)  # the shape of a parameter on which an optimizer shows what it keeps
FAST = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}  # for speed, or for a GPU alone

States = dict[int, dict[str, Any]]


def parts(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and numbers, both by PARAMETER/PART; parameters go by their place."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{key}"] = value.clone()  # Adam's counters share memory, which a file cannot
            else:
                numbers[f"{index}/{key}"] = value
    return tensors, numbers


def read(optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Any) -> States:
    """The states by parameter. Raises ValueError where this optimizer could not resume from them; the optimizer is left as it is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {str(index): index for index in range(len(parameters))}
    if not isinstance(numbers, dict) or not all(value is None or isinstance(value, int | float) for value in numbers.values()):
        raise ValueError("the optimizer's numbers must be numbers by name")
    states: States = {}
    for key, value in [*tensors.items(), *numbers.items()]:
        index, _, part = key.partition("/")
        if index not in names or not part:
            raise ValueError(f"the optimizer has {len(parameters)} parameters and no place for {key!r}")
        states.setdefault(names[index], {})[part] = _placed(value, parameters[names[index]])
    for (group, expected), places in zip(_kept(optimizer), _places(optimizer), strict=True):
        for index in places:
            if expected is not None and index in states:
                _check(states[index], expected, parameters[index], f"{type(optimizer).__name__} of group {group}, parameter {index}")
    return states


def restore(optimizer: Optimizer, states: States) -> None:
    """Give the optimizer these states, or leave it as it was: an optimizer of the caller's may refuse them with a ValueError."""
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict({"state": states, "param_groups": before["param_groups"]})
    except Exception as error:
        optimizer.load_state_dict(before)
        raise ValueError(f"{type(optimizer).__name__} does not take its state ({error!r})") from error


def _placed(value: Any, parameter: Tensor) -> Any:
    """In the parameter's own order in memory (channels last), which a file does not keep and fused steps rely on."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _places(optimizer: Optimizer) -> list[range]:
    ends, places = 0, []
    for group in optimizer.param_groups:
        places.append(range(ends, ends := ends + len(group["params"])))
    return places


def _kept(optimizer: Optimizer) -> list[tuple[int, dict[str, Any] | None]]:
    """By group, the state an optimizer keeps per parameter, read from a copy after a step on a small parameter.

    None for an optimizer that is not torch's: it may begin to keep more after any number of steps.
    """
    return [(number, _after_a_step(optimizer, group)) for number, group in enumerate(optimizer.param_groups)]


def _after_a_step(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any] | None:
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    small = nn.Parameter(torch.zeros(PROBE))
    small.grad = torch.zeros(PROBE)
    settings = {name: value for name, value in group.items() if name not in FAST}
    try:
        settings["lr"] = float(group["lr"])  # a tensor on the GPU where steps are CUDA graphs
        like = copy.copy(optimizer)
        like.state, like.param_groups = defaultdict(dict), [{**settings, **FAST, "params": [small]}]
        like.step()
    except Exception:  # some make their state when they are made
        return None
    return dict(like.state[small])


def _check(state: Mapping[str, Any], expected: Mapping[str, Any], parameter: Tensor, whose: str) -> None:
    kept = {key for key, value in expected.items() if value is not None}
    there = {key for key, value in state.items() if value is not None}
    if kept != there:
        raise ValueError(f"{whose}: must keep {sorted(kept)}, found {sorted(there)}")
    for key in kept:
        value, like = state[key], expected[key]
        if isinstance(value, Tensor) != isinstance(like, Tensor):
            raise ValueError(f"{whose}: {key} must be a {type(like).__name__}")
        if not isinstance(like, Tensor):
            continue
        shape = parameter.shape if like.shape == PROBE else like.shape
        if value.shape != shape or value.is_floating_point() != like.is_floating_point():
            form = f"{tuple(value.shape)}, {value.dtype}"
            raise ValueError(f"{whose}: {key} must be of shape {tuple(shape)} and a type like {like.dtype}; found {form}")
        if not value.dim() and not 0 <= float(value) < math.inf:  # a count of steps: a correction divides by what it makes of it
            raise ValueError(f"{whose}: {key} must be finite and not negative; found {float(value)}")
