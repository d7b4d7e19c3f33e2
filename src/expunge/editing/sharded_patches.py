"""Apply a change of some weights of a sharded model, revert it bit for bit, and keep it by torch's distributed checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from expunge.editing.patches import Edit, Patch
from expunge.errors import InputError, MismatchError
from expunge.runtime import processes
from expunge.runtime.sharded_files import load_sharded, save_sharded
from expunge.storage.sharded import check_rows, form_digest, is_sharded, like, local, reshard
from expunge.storage.tensors import weights_digest

KIND = "sharded-patch"
PARTS = ("where", "old", "new")


@dataclass(frozen=True, eq=False)
class ShardedPatch:
    """`Patch` of a model that FSDP2 shards: where, what was there and what comes there, each sharded as the parameters are.

    Every method is called by all processes. Where one of them finds a weight that is not as expected, all raise MismatchError and none
    changes anything. One that has another patch or model, raises or does not come within five minutes is an error on all, too.
    """

    where: Mapping[str, Any]
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    digest: str

    @classmethod
    def zeroing(cls, model: nn.Module, mask: Mapping[str, Any]) -> ShardedPatch:
        """What setting the masked weights to zero would change; the model is left as it is."""
        parameters = _agreed(model, mask)
        old = {name: torch.where(local(mask[name]), local(parameters[name].detach()), 0) for name in mask}
        with processes.collective(parameters.values()):
            digest = weights_digest(model)
        return cls(
            dict(mask),
            {name: like(parameters[name], values) for name, values in old.items()},
            {name: like(parameters[name], torch.zeros_like(values)) for name, values in old.items()},
            digest,
        )

    def apply(self, model: nn.Module) -> None:
        """Set the new values in place. Raises MismatchError, changing nothing, unless the model holds the old ones."""
        self._replace(model, self.old, self.new)

    def revert(self, model: nn.Module) -> None:
        """Set the old values in place. Raises MismatchError, changing nothing, unless the model holds the new ones."""
        self._replace(model, self.new, self.old)

    def gathered(self) -> Patch:
        """The same as a `Patch`, on every process: for a patch that fits there."""
        edits = {}
        with processes.collective(self.where.values()):
            for name, where in self.where.items():
                indices = where.full_tensor().reshape(-1).nonzero().squeeze(1)
                old, new = (values[name].full_tensor().reshape(-1)[indices].cpu() for values in (self.old, self.new))
                edits[name] = Edit(indices.cpu(), old, new, tuple(where.shape))
        return Patch(edits, self.digest)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Into a new folder, each process its shards."""
        tensors = {
            f"{part}/{name}": value
            for part, values in zip(PARTS, (self.where, self.old, self.new), strict=True)
            for name, value in values.items()
        }
        return save_sharded(folder, tensors, {"kind": KIND, "digest": self.digest, "names": "\n".join(self.where)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: nn.Module) -> ShardedPatch:
        """Read a patch for this model, whose shards may be others than those of the processes that wrote it."""

        def empty(told: Mapping[str, str]) -> dict[str, Any]:
            return {
                f"{part}/{name}": like(value, torch.zeros_like(local(value.detach()), dtype=torch.bool if part == "where" else value.dtype))
                for part in PARTS
                for name, value in _parameters(model, told["names"].split("\n")).items()
            }

        tensors, told = load_sharded(folder, empty, KIND)
        where, old, new = ({name: tensors[f"{part}/{name}"] for name in told["names"].split("\n")} for part in PARTS)
        return cls(where, old, new, told["digest"])

    def _replace(self, model: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        parameters, wrong = _agreed(model, self.where), torch.zeros((), dtype=torch.int64)
        for name, parameter in parameters.items():
            where, values = local(self.where[name]), local(parameter.detach())
            if not torch.equal(_bits(values[where]), _bits(local(before[name])[where])):
                wrong += 1
        group = next(iter(parameters.values())).device_mesh.get_group()
        wrong = wrong.to(next(iter(parameters.values())).device)
        with processes.collective(parameters.values()):
            distributed.all_reduce(wrong, group=group)
        if int(wrong):
            raise MismatchError("the model does not hold the values that this patch expects; nothing was changed")
        with torch.no_grad():
            for name, parameter in parameters.items():
                values = local(parameter)
                values.copy_(torch.where(local(self.where[name]), local(after[name]), values))


def _agreed(model: nn.Module, mask: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a mask names, once all processes have the same mask and fitting parameters."""
    found: dict[str, Any] = {}

    def describe() -> dict[str, str]:
        if not mask:
            raise InputError("mask", "must name at least one parameter", "none")
        found.update(_parameters(model, mask))
        for name, value in mask.items():
            if not is_sharded(value) or value.dtype != torch.bool or value.shape != found[name].shape:
                raise InputError("mask", "must be of bool tensors, sharded as the parameters are and of their shapes", name)
        return {"mask": form_digest(mask)}

    processes.agree(describe)
    return found


def _parameters(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    reshard(model)
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in named or not is_sharded(named[name]):
            raise InputError("mask", "must name sharded parameters of the model", name)
        check_rows(name, named[name])
    return {name: named[name] for name in names}


def _bits(values: Tensor) -> Tensor:
    """0.0 is not −0.0 here, and a NaN is itself."""
    return values.contiguous().view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
