"""Save the state of a training in one file (weights, optimizer, epoch, random numbers) and resume it as if never stopped."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expunge.errors import ExpungeError, InputError, MismatchError
from expunge.runtime.modes import Generators
from expunge.storage.documents import excerpt, named_number, parse_json
from expunge.storage.tensors import load_tensors, save_tensors
from expunge.training import optimizer_states

KIND = "training"
MODEL, OPTIMIZER = "model/", "optimizer/"
CARRIED = "carried"  # files of a training without callbacks lack it
ELSEWHERE = "keep this one in another file, or folder, or remove that state to begin anew"
DATA = "data"  # the one optional setting: not every dataset has a digest, and older files lack it


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    epoch: int,
    settings: Mapping[str, str],
    device: torch.device,
    carried: Any = None,
) -> Path:
    """Save the state after `epoch` epochs; the file is replaced whole or not at all.

    `optimizer` None: without its state, of a training that has ended. `carried` is what callbacks hold, as plain JSON.
    """
    states, numbers = ({}, {}) if optimizer is None else optimizer_states.parts(optimizer)
    tensors: dict[str, Tensor] = {f"{MODEL}{name}": tensor for name, tensor in _weights(model).items()}
    tensors |= {f"{OPTIMIZER}{name}": tensor for name, tensor in states.items()}
    now = Generators.now()
    tensors |= {"random/torch": now.torch, "random/python": torch.tensor(now.python[1], dtype=torch.int64)}
    tensors["random/numpy"] = torch.from_numpy(now.numpy[1].astype(numpy.int64))
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    generators = {"python": [now.python[0], now.python[2]], "numpy": [now.numpy[0], *map(float, now.numpy[2:])]}
    metadata = {"kind": KIND, "epoch": str(epoch), "settings": json.dumps(settings), "trained": _trained(model)}
    if carried is not None:
        metadata[CARRIED] = json.dumps(carried)
    return save_tensors(path, tensors, metadata | {"optimizer": json.dumps(numbers), "random": json.dumps(generators)})


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    settings: Mapping[str, str],
    device: torch.device,
    epochs: int = 2**31,
    put: Callable[[Any], None] = lambda carried: None,
) -> int:
    """Restore the state and return the number of finished epochs, at most `epochs`; `put` is given what callbacks held.

    Raises before anything is changed where the file is of another training, or is incomplete.
    """
    tensors, metadata = load_tensors(path, KIND)
    with _as_saved(path):
        stored = parse_json(metadata["settings"])
        if not isinstance(stored, dict):
            raise ValueError("settings must be an object")
    needed = {name: value for name, value in settings.items() if name != DATA}
    if changed := [f"{name} {excerpt(stored.get(name))}, not {value}" for name, value in needed.items() if stored.get(name) != value]:
        raise MismatchError(f"{os.fspath(path)} is of a training with other settings: {'; '.join(changed)}; {ELSEWHERE}")
    if DATA in stored and DATA in settings and stored[DATA] != settings[DATA]:
        raise MismatchError(f"{os.fspath(path)} is of a training on other data; {ELSEWHERE}")
    current = _weights(model)
    weights = _named(tensors, MODEL)
    if _forms(weights) != _forms(current):
        different = sorted(name for name in {*weights, *current} if _forms(weights).get(name) != _forms(current).get(name))
        raise MismatchError(f"{os.fspath(path)} is of another network: {excerpt(', '.join(different[:4]))}")
    with _as_saved(path):
        if metadata["trained"] != _trained(model):
            raise MismatchError(f"{os.fspath(path)} is of a training of other parameters: {excerpt(metadata['trained'])}")
        epoch = named_number(metadata["epoch"], epochs)
        states = optimizer_states.read(optimizer, _named(tensors, OPTIMIZER), parse_json(metadata["optimizer"]))
        generators = _generators(tensors, parse_json(metadata["random"]))
        cuda = _cuda_state(tensors, device)
        if strange := sorted(name for name in tensors if not name.startswith((MODEL, OPTIMIZER, "random/"))):
            raise ValueError(f"there must be nothing else in it; found {strange[0]}")
        if CARRIED in metadata:
            put(parse_json(metadata[CARRIED]))  # before the random numbers are restored: it may draw some
        optimizer_states.restore(optimizer, states)
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(weights[name])
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    generators.restore()
    return epoch


@contextmanager
def _as_saved(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within the context, whatever is missing or impossible is the file's fault: its digest may be right and its content made up."""
    try:
        yield
    except ExpungeError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError("path", f"must hold all of a training ({excerpt(error)}); nothing was changed", os.fspath(path)) from error


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _generators(tensors: Mapping[str, Tensor], described: Any) -> Generators:
    """The generators' states, tried on separate generators first."""
    version, gauss = described["python"]
    name, position, has_gauss, cached = described["numpy"]
    if not all(isinstance(number, float) for number in (position, has_gauss, cached)) or not isinstance(gauss, float | None):
        raise ValueError("the states of random numbers must be numbers")
    words = tensors["random/numpy"]
    # numpy takes any place in its 624 words, and reads there.
    if not 0 <= position <= len(words) == 624 or words.dtype != torch.int64 or bool((words < 0).any()) or bool((words >= 2**32).any()):
        raise ValueError("numpy's random state must be 624 words and a place among them")
    generators = Generators(
        tensors["random/torch"],
        (version, tuple(tensors["random/python"].tolist()), gauss),
        (name, words.numpy().astype(numpy.uint32), int(position), int(has_gauss), cached),
    )
    torch.Generator().set_state(generators.torch)
    random.Random().setstate(generators.python)
    numpy.random.RandomState().set_state(generators.numpy)
    return generators


def _cuda_state(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
    if device.type != "cuda" or "random/cuda" not in tensors:
        return None
    torch.Generator(device).set_state(tensors["random/cuda"])
    return tensors["random/cuda"]


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
