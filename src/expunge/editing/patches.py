"""Apply a change of some weights in place, revert it bit for bit, and keep it on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.editing.masks import Mask, masked_parameters
from expunge.errors import InputError, MismatchError
from expunge.model.copying import unwrapped
from expunge.runtime.display import counted, first_rows, html_table, text_table
from expunge.storage.documents import excerpt, parse_json
from expunge.storage.tensors import load_tensors, save_tensors, weights_digest

DIMENSIONS = 64  # the most a tensor can have
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes, to compare bits


@dataclass(frozen=True, eq=False)
class Edit:
    """New values for some entries of one parameter or buffer of this shape; `indices` count its entries row by row."""

    indices: Tensor
    old: Tensor
    new: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Patch:
    """Edits of a model's parameters and buffers, and the digest of the weights they were made for.

    w_j ← 0 for j in M (paper: the masked parameter ŵ_r), with every w_j kept: `revert` undoes `apply`. `len(patch)` is |M|.

    A model that does not hold the expected values at the edited entries, bit for bit, raises MismatchError and stays unchanged. Its other
    weights may have changed.
    """

    edits: Mapping[str, Edit]
    digest: str

    def __post_init__(self) -> None:
        for name, edit in self.edits.items():
            _check_edit(name, edit)

    def __len__(self) -> int:
        return sum(edit.indices.numel() for edit in self.edits.values())

    def __repr__(self) -> str:
        return f"Patch({counted(len(self), 'entry', 'entries')} of {counted(len(self.edits), 'tensor')}, made for {self.digest[:12]})"

    def __str__(self) -> str:
        return text_table(repr(self), self._rows())

    def _repr_html_(self) -> str:
        return html_table(repr(self), self._rows())

    def _rows(self) -> list[Sequence[str]]:
        rows = [(name, f"{len(edit.indices):,}", f"{math.prod(edit.shape):,}") for name, edit in self.edits.items()]
        return first_rows([("tensor", "changed", "of"), *rows])

    @classmethod
    def zeroing(cls, model: nn.Module, mask: Mapping[str, Tensor]) -> Patch:
        """What setting the masked weights to zero would change; the model is left as it is."""
        model, edits = unwrapped(model), {}
        for name, (parameter, part) in masked_parameters(model, mask).items():
            indices = part.reshape(-1).nonzero().squeeze(1)
            old = parameter.detach().reshape(-1)[indices].cpu()
            edits[name] = Edit(indices.cpu(), old, torch.zeros_like(old), tuple(parameter.shape))
        return cls(edits, weights_digest(model))

    @classmethod
    def setting(cls, model: nn.Module, values: Mapping[str, Tensor]) -> Patch:
        """What giving these parameters and buffers these values would change; entries that would stay are left out."""
        model = unwrapped(model)
        own, edits = _tensors(model), {}
        for name, value in values.items():
            if name not in own:
                raise InputError("values", "must name parameters or buffers of the model", name)
            if value.shape != own[name].shape:
                raise InputError("values", f"{name} must have shape {tuple(own[name].shape)}", tuple(value.shape))
            before, after = (tensor.detach().reshape(-1) for tensor in (own[name], value.to(own[name])))
            indices = (before != after).nonzero().squeeze(1)
            edits[name] = Edit(indices.cpu(), before[indices].cpu(), after[indices].cpu(), tuple(value.shape))
        return cls(edits, weights_digest(model))

    @classmethod
    def between(cls, before: nn.Module, after: nn.Module, names: Iterable[str] | None = None) -> Patch:
        """What turns `before` into `after`: every entry of a parameter or buffer whose bits differ. Both are left as they are.

        `apply` takes `before` to `after`, `revert` takes `after` to `before`, bit for bit: 0.0 is not −0.0 here, and a NaN is itself. The
        models may be on different devices. They must have the same parameters and buffers, shared in the same way; `names` chooses some.
        """
        before, after = unwrapped(before), unwrapped(after)
        originals, results = own_tensors(before), own_tensors(after)
        if names is None:
            names = originals.keys()
            if strange := originals.keys() ^ results.keys():
                raise MismatchError(f"before and after must have the same parameters and buffers; only one of them has {_listed(strange)}")
        edits = {}
        for name in names:
            if name not in originals or name not in results:
                raise InputError("names", "must be of parameters or buffers of both models, those shared by their first name", name)
            old, new = originals[name].detach(), results[name].detach().to(originals[name].device)
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                forms = f"{tuple(old.shape)}, {old.dtype}, and {tuple(new.shape)}, {new.dtype}"
                raise MismatchError(f"before and after must hold {name} in one shape and type; found {forms}")
            indices = _different(old.reshape(-1), new.reshape(-1)).nonzero().squeeze(1)
            if len(indices):
                edits[name] = Edit(indices.cpu(), old.reshape(-1)[indices].cpu(), new.reshape(-1)[indices].cpu(), tuple(old.shape))
        return cls(edits, weights_digest(before))

    def apply(self, model: nn.Module) -> None:
        """Set the new values in place. Raises MismatchError, changing nothing, unless the model holds the old ones."""
        self._replace(model, {name: (edit.old, edit.new) for name, edit in self.edits.items()}, "this patch was made for")

    def revert(self, model: nn.Module) -> None:
        """Set the old values in place. Raises MismatchError, changing nothing, unless the model holds the new ones."""
        self._replace(model, {name: (edit.new, edit.old) for name, edit in self.edits.items()}, "this patch leaves behind")

    def mask(self, model: nn.Module) -> Mask:
        """True at the edited entries of the parameters, on the model's device; buffers are left out."""
        model = unwrapped(model)
        parameters, mask = dict(model.named_parameters(remove_duplicate=False)), {}
        for name, tensor in self._tensors(model).items():
            if name in parameters:
                flat = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
                flat[self.edits[name].indices.to(tensor.device)] = True
                mask[name] = flat.reshape(tensor.shape)
        return mask

    def save(self, path: str | os.PathLike[str]) -> Path:
        metadata = {"kind": "patch", "digest": self.digest, "shapes": json.dumps({name: edit.shape for name, edit in self.edits.items()})}
        tensors: dict[str, Tensor] = {}
        for name, edit in self.edits.items():
            tensors |= {f"indices/{name}": edit.indices, f"old/{name}": edit.old, f"new/{name}": edit.new}
        return save_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Patch:
        """Read a patch from its file. A file that is incomplete or was changed raises an error."""
        tensors, metadata = load_tensors(path, "patch")
        try:
            shapes: dict[str, Any] = parse_json(metadata["shapes"])
            edits = {
                name: Edit(tensors.pop(f"indices/{name}"), tensors.pop(f"old/{name}"), tensors.pop(f"new/{name}"), _shape(shape))
                for name, shape in shapes.items()
            }
            patch = cls(edits, metadata["digest"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError("path", f"must hold a patch ({excerpt(error)})", os.fspath(path)) from error
        if tensors:
            raise InputError("path", "must hold a patch and nothing else", excerpt(sorted(tensors)))
        return patch

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        own = _tensors(model)
        for name, edit in self.edits.items():
            if name not in own:
                raise MismatchError(f"the patch changes {name}, which the model does not have")
            form = (tuple(own[name].shape), own[name].dtype)
            if form != (edit.shape, edit.old.dtype):
                raise MismatchError(f"the patch is for {name} of shape {edit.shape}, {edit.old.dtype}; found shape {form[0]}, {form[1]}")
        return {name: own[name] for name in self.edits}

    def _replace(self, model: nn.Module, values: dict[str, tuple[Tensor, Tensor]], which: str) -> None:
        tensors = self._tensors(unwrapped(model))
        indices = {name: self.edits[name].indices.to(tensor.device) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            present = tensor.detach().reshape(-1)[indices[name]]
            if not torch.equal(_bytes(present), _bytes(values[name][0].to(tensor.device))):
                raise MismatchError(f"{name} does not hold the values {which}; nothing was changed")
        with torch.no_grad():
            for name, tensor in tensors.items():
                # Entry by entry and not through a flat view, which weights in another memory format do not have.
                target = tensor if tensor.dim() else tensor.view(1)
                target[torch.unravel_index(indices[name], target.shape)] = values[name][1].to(tensor.device)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name; a shared one once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or len(sizes) > DIMENSIONS or not all(type(size) is int for size in sizes):
        raise ValueError(f"a shape must be a list of at most {DIMENSIONS} whole numbers; found {excerpt(sizes)}")
    return tuple(sizes)


def _check_edit(name: str, edit: Edit) -> None:
    def check(holds: bool, rule: str, value: object) -> None:
        if not holds:
            raise InputError(f"edits[{name!r}]", rule, value)

    indices, entries = edit.indices, math.prod(edit.shape)
    check(min(edit.shape, default=0) >= 0, "shape must not be negative", edit.shape)
    check(indices.dtype == torch.int64 and indices.dim() == 1, "indices must be int64, 1-D", f"{indices.dtype}, {indices.dim()}-D")
    check(edit.old.dtype == edit.new.dtype, "old and new values must have one type", f"{edit.old.dtype} and {edit.new.dtype}")
    lengths = [tuple(tensor.shape) for tensor in (indices, edit.old, edit.new)]
    check(len(set(lengths)) == 1, "indices, old and new values must be of one length", lengths)
    if indices.numel():
        check(bool((indices[1:] > indices[:-1]).all()), "indices must rise", "some that do not")
        first, last = int(indices[0]), int(indices[-1])
        check(0 <= first and last < entries, f"indices must be in [0, {entries})", (first, last))


def _bytes(values: Tensor) -> Tensor:
    """For comparison bit by bit: 0.0 is not −0.0 here, and a NaN is itself."""
    return values.contiguous().view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)


def _different(old: Tensor, new: Tensor) -> Tensor:
    """Where the bits of two flat tensors of one type differ."""
    if old.dtype.itemsize in INTEGERS and not old.dtype.is_complex:
        integer = INTEGERS[old.dtype.itemsize]
        return old.contiguous().view(integer) != new.contiguous().view(integer)
    return (_bytes(old) != _bytes(new)).reshape(len(old), -1).any(1)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
