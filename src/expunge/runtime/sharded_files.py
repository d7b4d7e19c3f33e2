"""Keep sharded tensors by torch's distributed checkpoints: written whole or not at all, and errors told to all processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from expunge.errors import InputError
from expunge.runtime import processes
from expunge.storage.documents import read_json
from expunge.storage.files import check_folder, write_json

DESCRIPTION = "expunge.json"  # beside the files of the checkpoint


def save_sharded(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> Path:
    """Every process writes its shards into a new folder, which is renamed once all are there: all of it or nothing."""
    import torch.distributed.checkpoint as checkpoint

    target = Path(os.path.abspath(folder))
    unfinished = target.with_name(f".{target.name}.expunge-new")

    def check() -> dict[str, str]:
        check_folder("folder", folder)
        if target.exists():
            raise InputError("folder", "must be a new one", os.fspath(folder))
        return {"folder": os.fspath(target), **description}

    def finish() -> dict[str, str]:
        if processes.rank() == 0:
            write_json(unfinished / DESCRIPTION, dict(description))
            os.rename(unfinished, target)
        return {}

    processes.agree(check)
    checkpoint.save(dict(tensors), checkpoint_id=unfinished)
    processes.agree(finish)
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
