"""The state of a training in one file: weights, optimizer, epoch and random numbers, so that it can go on as if never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expunge.artifacts import load_tensors, save_tensors
from expunge.errors import MismatchError
from expunge.modes import Generators

KIND = "training"
DATA = "data"  # the one setting that need not be known: not every dataset tells, and older files do not have it


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, epoch: int, settings: Mapping[str, str], device: torch.device
) -> Path:
    """After `epoch` epochs; the file is replaced whole or not at all."""
    tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in _weights(model).items()}
    numbers: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value.clone()  # Adam's counters share memory, which a file cannot
            else:
                numbers[f"{index}/{key}"] = value
    now = Generators.now()
    tensors |= {"random/torch": now.torch, "random/python": torch.tensor(now.python[1], dtype=torch.int64)}
    tensors["random/numpy"] = torch.from_numpy(now.numpy[1].astype(numpy.int64))
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    generators = {"python": [now.python[0], now.python[2]], "numpy": [now.numpy[0], *map(float, now.numpy[2:])]}
    metadata = {"kind": KIND, "epoch": str(epoch), "settings": json.dumps(settings), "trained": _trained(model)}
    return save_tensors(path, tensors, metadata | {"optimizer": json.dumps(numbers), "random": json.dumps(generators)})


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, settings: Mapping[str, str], device: torch.device) -> int:
    """Put everything back where it was; the number of epochs that are done. A file of another training is refused, nothing changed."""
    tensors, metadata = load_tensors(path, KIND)
    kept = json.loads(metadata["settings"])
    needed = {name: value for name, value in settings.items() if name != DATA}
    if other := [f"{name} {kept.get(name)}, not {value}" for name, value in needed.items() if kept.get(name) != value]:
        raise MismatchError(f"{os.fspath(path)} is of a training with other settings: {'; '.join(other)}; keep this one in another file")
    if DATA in kept and DATA in settings and kept[DATA] != settings[DATA]:
        raise MismatchError(f"{os.fspath(path)} is of a training on other data; keep this one in another file")
    held = _weights(model)
    found = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    if _forms(found) != _forms(held):
        different = sorted(name for name in {*found, *held} if _forms(found).get(name) != _forms(held).get(name))
        raise MismatchError(f"{os.fspath(path)} is of another network: {', '.join(different[:4])}")
    if metadata["trained"] != _trained(model):
        raise MismatchError(f"{os.fspath(path)} is of a training of other parameters: {metadata['trained']}")
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(found[name])
    _restore_optimizer(optimizer, tensors, json.loads(metadata["optimizer"]))
    _restore_random(tensors, json.loads(metadata["random"]), device)
    return int(metadata["epoch"])


def _restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *((f"optimizer/{key}", value) for key, value in numbers.items())]:
        if key.startswith("optimizer/"):
            _, index, part = key.split("/", 2)
            if isinstance(value, Tensor) and value.shape == parameters[int(index)].shape:
                # In the parameter's own order in memory (channels last), which a file does not keep and fused steps rely on.
                value = torch.empty_like(parameters[int(index)], dtype=value.dtype, requires_grad=False).copy_(value)
            states.setdefault(int(index), {})[part] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _restore_random(tensors: Mapping[str, Tensor], generators: Mapping[str, list[Any]], device: torch.device) -> None:
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
    version, gauss = generators["python"]
    name, position, has_gauss, cached = generators["numpy"]
    Generators(
        tensors["random/torch"],
        (version, tuple(tensors["random/python"].tolist()), gauss),
        (name, tensors["random/numpy"].numpy().astype(numpy.uint32), int(position), int(has_gauss), cached),
    ).restore()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    model = _plain(model)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _trained(model: nn.Module) -> str:
    """The names of the trained parameters: the optimizer's state goes by their order."""
    return ", ".join(name for name, parameter in _plain(model).named_parameters() if parameter.requires_grad)


def _plain(model: nn.Module) -> nn.Module:
    """The module inside what torch.compile makes of it, which has the same weights by other names."""
    return getattr(model, "_orig_mod", model)


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
