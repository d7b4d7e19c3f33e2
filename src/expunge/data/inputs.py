"""Find the inputs of a batch: the tensors that can be changed a little, or that a gradient is taken by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from expunge.data.calling import RAW, described
from expunge.data.objective import LABEL_KEYS, Batch, Objective, batch_targets
from expunge.errors import InputError
from expunge.runtime.nested import map_tensors, tensors
from expunge.validate import is_whole, shown

Names = tuple[str | int, ...]


def input_tensors(batch: Batch, objective: Objective, names: Names | None, why: str) -> list[Tensor]:
    """The inputs: the entries called `names`, or the one tensor of floating-point numbers.

    Left out are the targets (the last entry of a tuple, the label key of a mapping, what `objective.targets` returns) and entries of a
    mapping whose name contains "mask". Where none or several are left, this raises. `why` begins the error's sentence: "JiT needs".
    """
    if names is not None:
        return [_entry(batch, name, why) for name in names]
    entries = _candidates(batch, objective)
    found = {name: [tensor for tensor in tensors(entry) if tensor.is_floating_point()] for name, entry in entries.items()}
    inputs = [tensor for part in found.values() for tensor in part]
    if len(inputs) == 1:
        return inputs
    if inputs:
        listed = tuple(name for name, part in found.items() if part)
        rule = f"{why} to know which entries are the inputs, and several may be: name them, as in inputs={listed[:1]!r} or {listed!r}"
        raise InputError("forget", rule, described(batch))
    raise InputError("forget", f"{why} inputs of floating-point numbers{_advice(entries)}", described(batch))


def replaced(batch: Batch, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> Batch:
    """The same batch with these tensors in place of its inputs."""
    new = {id(tensor): value for tensor, value in zip(inputs, values, strict=True)}
    return map_tensors(batch, lambda tensor: new.get(id(tensor), tensor))


def check_inputs(names: Any) -> Names | None:
    """One name or place, or several; None where the inputs are to be found."""
    if names is None:
        return None
    listed = (names,) if isinstance(names, str) or is_whole(names) else tuple(names) if isinstance(names, (tuple, list)) else ()
    if not listed or not all(isinstance(name, str) or (is_whole(name) and name >= 0) for name in listed):
        rule = "must name the inputs in a batch: keys of a mapping or places in a tuple, such as ('pixel_values',) or (0,); or None"
        raise InputError("inputs", rule, shown(names))
    return tuple(name if isinstance(name, str) else int(name) for name in listed)


def _candidates(batch: Batch, objective: Objective) -> dict[Any, Any]:
    """What of a batch is neither its targets nor a mask, by name or place."""
    try:
        targets = tensors(objective.targets(batch))
    except RAW:  # a batch needs no targets where the loss is not of classes; elsewhere they were checked before
        targets = []
    read_by_default = objective.targets is batch_targets
    if isinstance(batch, Mapping):
        labels = [key for key in LABEL_KEYS if key in batch][:1] if read_by_default else []
        entries = {key: value for key, value in batch.items() if key not in labels and "mask" not in str(key).lower()}
    elif isinstance(batch, (tuple, list)):
        entries = dict(enumerate(batch[:-1] if read_by_default else batch))
    else:
        entries = {"": batch}
    return {name: entry for name, entry in entries.items() if not any(_same(entry, tensor) for tensor in targets)}


def _same(entry: Any, tensor: Tensor) -> bool:
    """Whether an entry is this tensor, or another view of all its numbers."""
    alike = isinstance(entry, Tensor) and (entry.shape, entry.dtype, entry.device) == (tensor.shape, tensor.dtype, tensor.device)
    return alike and entry.data_ptr() == tensor.data_ptr()


def _entry(batch: Batch, name: str | int, why: str) -> Tensor:
    try:
        entry = batch[name]
    except (LookupError, TypeError) as error:
        raise InputError("inputs", "must name entries of the forget data's batches", f"{name!r} for {described(batch)}") from error
    if not isinstance(entry, Tensor):
        raise InputError("inputs", "must name tensors", f"{name!r}, {described(entry)}")
    if not entry.is_floating_point():
        raise InputError("inputs", f"{why} inputs of floating-point numbers{_advice([entry])}", described(entry))
    return entry


def _advice(entries: Any) -> str:
    """What to do with token ids and with images of bytes."""
    found = tensors(entries)
    if any(tensor.dtype == torch.uint8 for tensor in found):
        return "; convert bytes before, with .float() / 255, where the model takes them"
    if any(not tensor.is_floating_point() for tensor in found):
        return "; token ids have neighbours only after the embedding: give embedded tokens (inputs_embeds) to a model that takes them"
    return ""
