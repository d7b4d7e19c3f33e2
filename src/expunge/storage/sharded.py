"""Read the shards of sharded tensors (DTensor, of FSDP2's `fully_shard`), and keep them by torch's distributed checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expunge.errors import InputError, ModelError
from expunge.storage.documents import read_json
from expunge.storage.files import check_folder, write_json

DESCRIPTION = "expunge.json"  # beside the files of the checkpoint


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


def save_sharded(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> Path:
    """Every process writes its shards into a new folder, which is renamed once all are there: all of it or nothing."""
    import torch.distributed as distributed
    import torch.distributed.checkpoint as checkpoint

    check_folder("folder", folder)
    target = Path(os.path.abspath(folder))
    if target.exists():
        raise InputError("folder", "must be a new one", os.fspath(folder))
    unfinished = target.with_name(f".{target.name}.expunge-new")
    checkpoint.save(dict(tensors), checkpoint_id=unfinished)
    if distributed.get_rank() == 0:
        write_json(unfinished / DESCRIPTION, dict(description))
        os.rename(unfinished, target)
    distributed.barrier()
    return Path(folder)


def load_sharded(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor], kind: str) -> dict[str, str]:
    """Read into these tensors, which may be sharded over another number of processes than those that wrote; returns the description."""
    import torch.distributed.checkpoint as checkpoint

    try:
        description = read_json(Path(folder) / DESCRIPTION)
        if not isinstance(description, dict) or description.get("kind") != kind:
            raise ValueError(f"its kind is not {kind!r}")
    except (OSError, ValueError) as error:
        raise InputError("folder", f"must hold {kind!r} ({error})", os.fspath(folder)) from error
    try:
        checkpoint.load(dict(tensors), checkpoint_id=Path(folder))
    except Exception as error:  # whatever a damaged or another model's checkpoint leads to
        reason = str(error).strip().splitlines()[-1][:200]
        raise InputError("folder", f"must hold {kind!r} of this model ({reason})", os.fspath(folder)) from error
    return {str(name): str(value) for name, value in description.items()}
