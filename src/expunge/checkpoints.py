"""The state of a training in one file: weights, optimizer, epoch and random numbers, so that it can go on as if never stopped."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expunge.artifacts import load_tensors, save_tensors
from expunge.errors import MismatchError

KIND = "training"


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, epoch: int, settings: str, device: torch.device) -> Path:
    """After `epoch` epochs; the file is replaced whole or not at all."""
    tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in _weights(model).items()}
    numbers: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value.clone()  # Adam's counters share memory, which a file cannot
            else:
                numbers[f"{index}/{key}"] = value
    python, legacy = random.getstate(), numpy.random.get_state()
    tensors |= {"random/torch": torch.get_rng_state(), "random/python": torch.tensor(python[1], dtype=torch.int64)}
    tensors["random/numpy"] = torch.from_numpy(legacy[1].astype(numpy.int64))  # type: ignore[index]
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    generators = {"python": [python[0], python[2]], "numpy": [legacy[0], *map(float, legacy[2:])]}  # type: ignore[index]
    metadata = {"kind": KIND, "epoch": str(epoch), "settings": settings, "optimizer": json.dumps(numbers), "random": json.dumps(generators)}
    return save_tensors(path, tensors, metadata)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, settings: str, device: torch.device) -> int:
    """Put everything back where it was; the number of epochs that are done. A file of another training is refused, nothing changed."""
    tensors, metadata = load_tensors(path, KIND)
    if metadata["settings"] != settings:
        raise MismatchError(f"{os.fspath(path)} is of a training with other settings: {metadata['settings']}; asked for: {settings}")
    held = _weights(model)
    found = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    if _forms(found) != _forms(held):
        different = sorted(name for name in {*found, *held} if _forms(found).get(name) != _forms(held).get(name))
        raise MismatchError(f"{os.fspath(path)} is of another network: {', '.join(different[:4])}")
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(found[name])
    states: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *((f"optimizer/{key}", value) for key, value in json.loads(metadata["optimizer"]).items())]:
        if key.startswith("optimizer/"):
            _, index, part = key.split("/", 2)
            states.setdefault(int(index), {})[part] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    _restore_random(tensors, json.loads(metadata["random"]), device)
    return int(metadata["epoch"])


def _restore_random(tensors: Mapping[str, Tensor], generators: Mapping[str, list[Any]], device: torch.device) -> None:
    torch.set_rng_state(tensors["random/torch"])
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
    version, gauss = generators["python"]
    random.setstate((version, tuple(tensors["random/python"].tolist()), gauss))
    name, position, has_gauss, cached = generators["numpy"]
    numpy.random.set_state((name, tensors["random/numpy"].numpy().astype(numpy.uint32), int(position), int(has_gauss), cached))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
