"""Read the shards of sharded tensors (DTensor, of FSDP2's `fully_shard`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expunge.errors import ModelError


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; asked in this way, since importing that class takes a moment."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


def check_rows(name: str, tensor: Any) -> None:
    """Require what `fully_shard` makes by default: rows over one dimension of processes, those of rank 0 first."""
    placements = tensor.placements
    if len(placements) != 1 or not (placements[0].is_shard(0) or placements[0].is_replicate()):
        raise ModelError(f"{name} must be sharded by rows over one dimension of processes, as fully_shard does; found {placements}")


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
