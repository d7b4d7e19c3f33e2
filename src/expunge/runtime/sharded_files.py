"""Keep sharded tensors by torch's distributed checkpoints: written whole or not at all, and errors told to all processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from expunge.errors import ExpungeError, InputError
from expunge.runtime import processes
from expunge.runtime.processes import MissingProcessError
from expunge.storage.documents import read_json
from expunge.storage.files import check_folder, write_json
from expunge.storage.folders import remove
from expunge.storage.sharded import form_digest

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
        return {"folder": os.fspath(target), **description, "tensors": form_digest(tensors)}

    def begin() -> dict[str, str]:
        if processes.rank() == 0:
            remove(unfinished)  # of a process that was killed
        return {}

    def finish() -> dict[str, str]:
        if processes.rank() == 0:
            write_json(unfinished / DESCRIPTION, dict(description))
            os.rename(unfinished, target)
        return {}

    processes.agree(check)
    processes.agree(begin)
    try:
        with processes.collective(tensors.values()):
            checkpoint.save(dict(tensors), checkpoint_id=unfinished)
    except checkpoint.CheckpointException as failure:  # on all processes
        if processes.rank() == 0:
            remove(unfinished)
        rank, (error, _) = next(iter(failure.failures.items()))
        if rank == processes.rank() and isinstance(error, Exception):
            raise error from failure
        raise MissingProcessError(f"rank {rank} failed: {type(error).__name__}: {error}") from failure
    processes.agree(finish)
    return Path(folder)


def load_sharded(
    folder: str | os.PathLike[str], empty: Callable[[Mapping[str, str]], dict[str, Any]], kind: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors that `empty` makes for a description, filled from the folder, and the description.

    They may be sharded over another number of processes than those that wrote.
    """
    import torch.distributed.checkpoint as checkpoint

    told: dict[str, str] = {}
    tensors: dict[str, Any] = {}

    def describe() -> dict[str, str]:
        try:
            description = read_json(Path(folder) / DESCRIPTION)
            if not isinstance(description, dict) or description.get("kind") != kind:
                raise ValueError(f"its kind is not {kind!r}")
        except (OSError, ValueError) as error:
            raise InputError("folder", f"must hold {kind!r} ({error})", os.fspath(folder)) from error
        told.update({str(name): str(value) for name, value in description.items()})
        tensors.update(empty(told))
        return {"folder": os.path.abspath(folder), **told, "tensors": form_digest(tensors)}

    processes.agree(describe)
    try:
        with processes.collective(tensors.values()):
            checkpoint.load(tensors, checkpoint_id=Path(folder))
    except ExpungeError:
        raise
    except (Exception, checkpoint.CheckpointException) as error:  # whatever a damaged or another model's checkpoint leads to
        reason = str(error).strip().splitlines()[-1][:200]
        raise InputError("folder", f"must hold {kind!r} of this model ({reason})", os.fspath(folder)) from error
    return tensors, told
