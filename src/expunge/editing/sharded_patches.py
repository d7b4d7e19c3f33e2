"""Apply a change of some weights of a sharded model, revert it bit for bit, and keep it by torch's distributed checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from expunge.editing.patches import Edit, Patch
from expunge.errors import InputError, MismatchError
from expunge.runtime.sharded_files import load_sharded, save_sharded
from expunge.storage.sharded import check_rows, is_sharded, like, local
from expunge.storage.tensors import weights_digest

KIND = "sharded-patch"


@dataclass(frozen=True, eq=False)
class ShardedPatch:
    """`Patch` of a model that FSDP2 shards: where, what was there and what comes there, each sharded as the parameters are.

    Every method is called by all processes. Where one of them finds a weight that is not as expected, all raise MismatchError and none
    changes anything.
    """

    where: Mapping[str, Any]
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    digest: str

    @classmethod
    def zeroing(cls, model: nn.Module, mask: Mapping[str, Any]) -> ShardedPatch:
        """What setting the masked weights to zero would change; the model is left as it is."""
        parameters = _parameters(model, mask)
        old = {name: torch.where(local(mask[name]), local(parameters[name].detach()), 0) for name in mask}
        return cls(
            dict(mask),
            {name: like(parameters[name], values) for name, values in old.items()},
            {name: like(parameters[name], torch.zeros_like(values)) for name, values in old.items()},
            weights_digest(model),
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
        for name, where in self.where.items():
            indices = where.full_tensor().reshape(-1).nonzero().squeeze(1)
            old, new = (values[name].full_tensor().reshape(-1)[indices].cpu() for values in (self.old, self.new))
            edits[name] = Edit(indices.cpu(), old, new, tuple(where.shape))
        return Patch(edits, self.digest)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Into a new folder, each process its shards."""
        tensors = {
            f"{part}/{name}": value
            for part, values in {"where": self.where, "old": self.old, "new": self.new}.items()
            for name, value in values.items()
        }
        return save_sharded(folder, tensors, {"kind": KIND, "digest": self.digest, "names": "\n".join(self.where)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: nn.Module) -> ShardedPatch:
        """Read a patch for this model, whose shards may be others than those of the processes that wrote it."""
        told = load_sharded(folder, {}, KIND)
        parameters = _parameters(model, dict.fromkeys(told["names"].split("\n")))
        parts = {
            part: {
                name: like(value, torch.zeros_like(local(value.detach()), dtype=torch.bool if part == "where" else value.dtype))
                for name, value in parameters.items()
            }
            for part in ("where", "old", "new")
        }
        load_sharded(folder, {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}, KIND)
        return cls(parts["where"], parts["old"], parts["new"], told["digest"])

    def _replace(self, model: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        parameters, wrong = _parameters(model, self.where), torch.zeros((), dtype=torch.int64)
        for name, parameter in parameters.items():
            where, values = local(self.where[name]), local(parameter.detach())
            if not torch.equal(_bits(values[where]), _bits(local(before[name])[where])):
                wrong += 1
        group = next(iter(parameters.values())).device_mesh.get_group()
        wrong = wrong.to(next(iter(parameters.values())).device)
        distributed.all_reduce(wrong, group=group)
        if int(wrong):
            raise MismatchError("the model does not hold the values that this patch expects; nothing was changed")
        with torch.no_grad():
            for name, parameter in parameters.items():
                values = local(parameter)
                values.copy_(torch.where(local(self.where[name]), local(after[name]), values))


def _parameters(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in named or not is_sharded(named[name]):
            raise InputError("mask", "must name sharded parameters of the model", name)
        check_rows(name, named[name])
    return {name: named[name] for name in names}


def _bits(values: Tensor) -> Tensor:
    """0.0 is not −0.0 here, and a NaN is itself."""
    return values.contiguous().view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
