"""Load and save the weights of a user's model: safetensors, or a .pt file through torch's loader of plain weights alone."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from expunge.errors import InputError, MismatchError
from expunge.storage.documents import excerpt, parse_json
from expunge.storage.tensors import content_digest, load_tensors, open_tensors, save_tensors

KIND = "weights"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
ARGUMENT = "weights"
WRAPPERS = ("module.", "_orig_mod.", "model.")  # before every name: DistributedDataParallel, torch.compile, Lightning
Tensors = dict[str, Tensor]


def load_weights(path: str | os.PathLike[str], model: nn.Module) -> tuple[str, ...]:
    """Set the model's weights to those of a file, in place; raises before any change where one does not fit, in name, shape or type.

    Names that share a tensor (tied weights) may be stored once. A file of adapters holds all that is trained; what is frozen may be
    missing, and stays as the task made it. Returns the names that the file holds, with all they share a tensor with.
    """
    own = model.state_dict(keep_vars=True)
    stored = without_wrapper(read_weights(path), own)
    if strange := [name for name, value in own.items() if not isinstance(value, Tensor)]:
        raise InputError("task", "the model's state_dict must hold tensors alone", strange[0])
    tied = shared_names(model)
    frozen = {name for name, value in own.items() if isinstance(value, nn.Parameter) and not value.requires_grad}
    groups: dict[str, list[str]] = {}
    for name in own:
        groups.setdefault(tied.get(name, name), []).append(name)
    absent = [first for first, names in groups.items() if not any(name in stored for name in names)]
    missing = sorted(first for first in absent if not stored or first not in frozen)
    if strange := [*missing, *sorted(stored.keys() - own.keys())]:
        who = "only the model has" if missing else "only the file has"
        # transformers 5 stores many models under the names of their first version, which are no names of the state_dict.
        hint = "; save_pretrained may rename: store model.state_dict() instead" if hasattr(model, "save_pretrained") else ""
        raise MismatchError(f"weights: {os.fspath(path)} is of another model than that of the task: {who} {excerpt(strange[0])}{hint}")
    for name, tensor in stored.items():
        form, wanted = (tuple(tensor.shape), tensor.dtype), (tuple(own[name].shape), own[name].dtype)
        if form != wanted:
            raise MismatchError(
                f"weights: {os.fspath(path)} holds {name} as {form[0]}, {form[1]}; the model has it as {wanted[0]}, {wanted[1]}"
            )
        if not _same_bits(tensor, stored.get(tied.get(name, name), tensor)):
            raise MismatchError(
                f"weights: {os.fspath(path)} holds other values for {name} than for {tied[name]}, which the model has as one"
            )
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)
    return tuple(name for name in own if tied.get(name, name) not in absent)


def read_weights(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a file by name."""
    file = Path(path)
    if not os.fspath(path) or not file.is_file():
        raise InputError(ARGUMENT, "must be a file of weights, .safetensors or .pt", os.fspath(path) or "an empty path")
    try:
        return _unpickled(file) if file.suffix in PICKLES else _tensors(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def without_wrapper(stored: Tensors, own: Container[str]) -> Tensors:
    """Under the names that the model has, where all of the file begin with that of a wrapper, or of several."""
    bare = stored
    while bare and not any(name in own for name in bare):
        prefix = next((prefix for prefix in WRAPPERS if all(name.startswith(prefix) for name in bare)), None)
        if prefix is None:
            return stored
        bare = {name.removeprefix(prefix): tensor for name, tensor in bare.items()}
    return bare


def _tensors(file: Path) -> Tensors:
    try:
        with open_tensors(file) as opened:
            metadata = dict(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except OSError:
        raise
    except Exception as error:  # a header that lies can fail in any way
        raise InputError(ARGUMENT, f"must be a whole safetensors file ({excerpt(error)})", os.fspath(file)) from error
    if metadata.get("kind") == KIND and "content" in metadata:  # one of ours: its own digest must hold
        tensors, _ = load_tensors(file, KIND)
    return tensors


def _unpickled(file: Path) -> Tensors:
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what torch's reader makes of a file that ends early
            raise
        raise InputError(ARGUMENT, "must be a whole file, as torch.save wrote it; this one was cut off", os.fspath(file)) from error
    except Exception as error:  # torch raises all kinds for files that are none of its own
        rule = "must hold tensors by name, as safetensors or torch.save(model.state_dict(), ...) write them"
        if isinstance(error, UnpicklingError):
            raise InputError(ARGUMENT, f"{rule}; a whole model is never read, since its pickle could run code", os.fspath(file)) from error
        reason = excerpt(" ".join(str(error).split()), 100)
        raise InputError(ARGUMENT, f"{rule} ({reason})", os.fspath(file)) from error
    if isinstance(content, Mapping) and not _is_state(content):  # a checkpoint, with an optimizer and epochs beside the weights
        states = [key for key, part in content.items() if _is_state(part)]
        if len(states) > 1:
            found = f"{excerpt(', '.join(map(str, states)))} in {os.fspath(file)}"
            raise InputError(ARGUMENT, "must hold one state_dict; save that of the model alone", found)
        content = content[states[0]] if states else content
    if not _is_state(content):
        raise InputError(ARGUMENT, "must hold a state_dict, tensors by name: torch.save(model.state_dict(), ...)", os.fspath(file))
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _is_state(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(part, Tensor) for part in content.values())


def shared_names(model: nn.Module) -> dict[str, str]:
    """Names of the state_dict that stand for a tensor which has an earlier name there, and that name."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            shared[name] = first[id(tensor)]
    return shared


def frozen_digest(model: nn.Module, stored: Container[str]) -> str | None:
    """Of what a file of adapters leaves out and the task's model() makes, shared ones once; None where it leaves out nothing."""
    shared = shared_names(model)
    left_out = {name: tensor for name, tensor in model.state_dict().items() if name not in stored and name not in shared}
    return content_digest(left_out, {}) if left_out else None


def weights_of(model: nn.Module, names: Iterable[str]) -> Tensors:
    """These tensors of the model's state_dict, as a file holds them: on the CPU, none shared."""
    own = model.state_dict()
    return {name: own[name].detach().cpu().contiguous().clone() for name in names}


def save_weights(path: Path, tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> Path:
    """`model.load_state_dict(safetensors.torch.load_file(path))` reads it: tied weights are stored under each of their names."""
    return save_tensors(path, tensors, {"kind": KIND, "shared": json.dumps(dict(sorted(shared.items())))})


def load_saved(path: Path) -> tuple[Tensors, dict[str, str]]:
    """What `save_weights` wrote: the tensors, and which names share one."""
    tensors, metadata = load_tensors(path, KIND)
    try:
        shared = parse_json(metadata["shared"])
        if not isinstance(shared, dict) or not all(name in tensors and first in tensors for name, first in shared.items()):
            raise ValueError("names that share a tensor must be names of tensors")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(ARGUMENT, f"must be weights that `expunge unlearn` wrote ({excerpt(error)})", os.fspath(path)) from error
    return tensors, shared


def digest_of(tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, those that are shared once, under their first name."""
    unique: Tensors = {}
    for name, tensor in tensors.items():
        unique.setdefault(shared.get(name, name), tensor)
    return content_digest(unique, {})


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return first is second or (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8))
    )
