"""Compute Fisher sums chunk by chunk: by any number of processes with the same bits, and on where a pass was stopped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, device_of
from expunge.data.chunk_passes import fold
from expunge.data.chunks import BATCHES, Chunks, cut
from expunge.data.objective import Objective, check_objective
from expunge.errors import naming
from expunge.fisher import kinds
from expunge.fisher.borrowing import wanted_parameters
from expunge.fisher.engine import KINDS, MAX_DRAWS, diagonal
from expunge.fisher.naming import objective_name
from expunge.fisher.sums import FisherSums
from expunge.model.copying import unwrapped
from expunge.runtime.processes import PATIENCE
from expunge.runtime.progress import is_shown
from expunge.storage.folding import Sums
from expunge.storage.tensors import weights_digest
from expunge.validate import check_choice, check_positive, check_whole


def by_chunks(model: nn.Module, data: Data, **settings: Any) -> FisherSums:
    """`fisher.diagonal` over chunks of the data, shared by all processes of a torchrun; on each of them the sums of all data.

    On one type of machine the sums are the same bits for any number of processes, and whether or not the pass was stopped: a chunk is
    32 batches (`batches_per_chunk`) of fixed sizes, computed by itself with one thread on a CPU (`threads`), and chunks are added in
    float64 in the order of the data. Every sample counts once. Apart from rounding, the sums are those of `diagonal`.

    `keep` names a folder for finished chunks, at most some 64 files at a time. A pass that was stopped goes on from there, also with
    another number of processes; when a process ends early, the others do its chunks. Processes need not be of a torchrun: whatever
    runs the same pass with the same folder takes part. On several machines the folder must be one that all of them see.

    `kind`, `objective`, `parameters`, `draws`, `seed`, `batch_size` and `progress` are as in `diagonal`; the kind "sampled" draws by chunk.
    Processes with other weights, data or settings raise MismatchError on all of them; one that does not come, or finishes nothing, within
    `patience` seconds raises MissingProcessError.
    """
    (sums,) = by_group(model, data, None, **settings).values()
    return sums


def by_group(
    model: nn.Module,
    data: Data,
    groups: Sequence[Any] | Tensor | None,
    *,
    kind: str = "empirical",
    objective: Objective | None = None,
    parameters: Iterable[str] | None = None,
    draws: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    batches_per_chunk: int = BATCHES,
    keep: str | os.PathLike[str] | None = None,
    threads: int = 1,
    patience: float = PATIENCE,
    progress: bool | None = None,
) -> dict[str, FisherSums]:
    """`by_chunks` for each group of the samples; `groups` holds a name or a number, such as the label, for every sample of a dataset.

    The total is `FisherSums.merge(sums.values())`. A group's sums do not depend on the other groups.
    """
    check_positive("patience", patience)
    objective = Objective() if objective is None else objective
    model = unwrapped(model)
    names, digest, device, described = [], "", torch.device("cpu"), ""

    def prepare() -> tuple[Chunks, Mapping[str, str]]:
        """Checks what it is given, so that an error on one process is told to all."""
        nonlocal names, digest, device, described
        check_choice("kind", kind, KINDS)
        check_whole("draws", draws, minimum=1, maximum=MAX_DRAWS)
        check_whole("seed", seed, minimum=0)
        check_whole("threads", threads, minimum=1, maximum=1024)
        check_objective(objective)
        kinds.check_distribution(kind, objective)
        names = list(wanted_parameters(model, parameters))
        device, described, digest = device_of(model), objective_name(objective, kind), weights_digest(model)
        chosen = hashlib.sha256("\n".join(names).encode()).hexdigest()
        of_draws = {"draws": str(draws), "seed": str(seed)} if kind == "sampled" else {}
        settings = {"weights": digest, "kind": kind, "objective": described, "parameters": chosen, **of_draws, "device": device.type}
        return cut(data, batch_size, batches_per_chunk, groups), settings

    def work(chunks: Chunks, number: int) -> Sums:
        with naming("data"):
            sums = diagonal(
                model,
                chunks.read(number),
                kind=kind,
                objective=objective,
                parameters=names,
                draws=draws,
                seed=_seed(seed, chunks, number),
                progress=False,
            )
        return Sums(sums.to("cpu").sums, sums.count)

    title = f"Fisher ({kind})"
    totals = fold(prepare, work, keep, cpu_threads=threads, patience=patience, title=title, progress=is_shown(progress))
    sums = {group: {name: part.sums[name].to(device) for name in names} for group, part in totals.items()}
    return {group: FisherSums(sums[group], part.count, kind, digest, described) for group, part in totals.items()}


def _seed(seed: int, chunks: Chunks, number: int) -> int:
    """A seed for every chunk, so that no two draw the same numbers; by its place in its group, whatever other groups there are."""
    group = chunks.groups[number]
    return int.from_bytes(hashlib.sha256(f"{seed}|{number - chunks.groups.index(group)}|{group}".encode()).digest()[:8], "big") >> 1
