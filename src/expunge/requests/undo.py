"""Give back the weights as they were before all requests of a folder, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from expunge.editing.patches import Patch
from expunge.errors import InputError, MismatchError
from expunge.requests import folder as names
from expunge.requests.folder import check_new_file, misfits, receipt_at
from expunge.requests.receipt import RECEIPT
from expunge.requests.weights import Tensors, digest_of, load_saved, save_weights
from expunge.storage.folders import INSIDE


def undo(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """Write the original weights to a file and return their digest; neither the model nor its data are needed. The folder stays."""
    check_new_file(out)
    if Path(out).suffix != ".safetensors":
        raise InputError("out", "must end in .safetensors", os.fspath(out))
    path = Path(folder)
    if not (path / RECEIPT).is_file():
        raise InputError("folder", f"must be a folder of requests, with a {RECEIPT}", os.fspath(folder))
    for what in misfits(path, INSIDE):
        raise InputError("folder", "must be as `expunge unlearn` left it", what)
    tensors, shared = original_weights(path)
    save_weights(Path(out), tensors, shared)
    return digest_of(tensors, shared)


def original_weights(folder: Path) -> tuple[Tensors, dict[str, str]]:
    """The weights of the folder with the patch taken back; raises MismatchError unless they are those the receipt names."""
    tensors, shared = load_saved(folder / names.WEIGHTS)
    patch = Patch.load(folder / names.PATCH)
    for name, edit in patch.edits.items():
        if name not in tensors and not len(edit.indices):
            continue
        if name not in tensors or tuple(tensors[name].shape) != edit.shape or tensors[name].dtype != edit.old.dtype:
            raise MismatchError(f"{names.PATCH} is for other weights than {names.WEIGHTS}: {name}")
        flat = tensors[name].reshape(-1)
        if not torch.equal(_bits(flat[edit.indices]), _bits(edit.new)):
            raise MismatchError(f"{names.WEIGHTS} does not hold the values of {name} that {names.PATCH} leaves behind")
        flat[edit.indices] = edit.old
    for name, first in shared.items():
        tensors[name] = tensors[first].clone()
    receipt = receipt_at(folder / RECEIPT)
    if digest_of(tensors, shared) != receipt.weights_before:
        raise MismatchError(f"{names.PATCH} does not lead back to the weights that {RECEIPT} names")
    return tensors, shared


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
