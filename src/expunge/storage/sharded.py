"""Read the shards of sharded tensors (DTensor, of FSDP2's `fully_shard`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from expunge.errors import ModelError


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; asked in this way, since importing that class takes a moment."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


def shards_itself(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module; its parameters may be whole at the moment."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def reshard(model: nn.Module) -> None:
    """Let every parameter be a DTensor again: FSDP2 leaves those of the outermost module whole after a forward pass without a backward."""
    for module in model.modules():
        if shards_itself(module):
            module.reshard()  # type: ignore[operator]


def form_digest(tensors: Mapping[str, Any]) -> str:
    """Of the names and shapes, in their order: what all processes must have alike, though each has other rows."""
    text = "\n".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return hashlib.sha256(text.encode()).hexdigest()


def check_rows(name: str, tensor: Any) -> None:
    """Require what `fully_shard` makes by default: rows over one dimension of all processes, those of rank 0 first.

    A part of the processes would see a part of the samples, and take it for all; in another order they would count equal scores wrongly.
    """
    placements, ranks = tensor.placements, tensor.device_mesh.mesh.flatten().tolist()
    if len(placements) != 1 or not (placements[0].is_shard(0) or placements[0].is_replicate()):
        raise ModelError(f"{name} must be sharded by rows over one dimension of processes, as fully_shard does; found {placements}")
    if ranks != list(range(torch.distributed.get_world_size())):
        raise ModelError(f"{name} must be sharded over all processes, in the order of their ranks; found ranks {ranks}")


def whole(tensor: Any) -> Tensor:
    """The tensor itself, or a sharded one gathered, which all of its processes must ask for."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local(tensor: Any) -> Tensor:
    """This process's rows."""
    return tensor.to_local()


def like(tensor: Any, rows: Tensor) -> Any:
    """These rows as a tensor that is sharded as another is."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(rows, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=stride)
