"""Run `expunge fisher`: build a store of Fisher sums for one's own model, or merge the shards of one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from expunge.errors import InputError
from expunge.runtime.display import counted
from expunge.runtime.exits import on_one_line, uninterrupted
from expunge.storage.files import check_folder

if TYPE_CHECKING:
    from expunge.requests.sums_store import Header


@dataclass(frozen=True)
class Fisher:
    do: Literal["build", "merge"]
    stores: tuple[str, ...]
    out: str
    task: str | None
    weights: str | None
    kind: Literal["empirical", "expected"]
    by: Literal["class", "rows"] | None
    shard: str
    batch_size: int
    device: str | None
    threads: int
    patience: float
    quiet: bool


def fisher_command(
    do: Literal["build", "merge"],
    stores: tuple[str, ...] = (),
    /,
    *,
    out: str,
    task: str | None = None,
    weights: str | None = None,
    kind: Literal["empirical", "expected"] = "empirical",
    by: Literal["class", "rows"] | None = None,
    shard: str = "1/1",
    batch_size: int = 128,
    device: str | None = None,
    threads: int = 1,
    patience: float = 300,
    quiet: bool = False,
) -> Fisher:
    """Store the Fisher sums of your training data once: a request with --sums then costs a pass over its own samples. The same command
    goes on after a stop. Several processes share the pass: torchrun --standalone --nproc_per_node=4 -m expunge fisher build ...

    Args:
        do: build a store by a pass over the training data; merge the shards of one.
        stores: For merge: the folders of the shards.
        out: Folder of the store.
        task: Your Python file with model(), train(), test().
        weights: The trained weights.
        kind: Of the Fisher information: at the true labels, or expected over all labels.
        by: Groups that are stored apart: by class (without it where there are at most 20), or ten by rows.
        shard: Such as 2/4: every fourth group, from the second on; for several machines.
        batch_size: Samples per pass.
        device: cuda if there is one, else cpu.
        threads: Of the CPU, of each process: sums are the same to the bit for one number of them.
        patience: Seconds to wait for another process of torchrun that does not come, or finishes nothing.
        quiet: No progress.
    """
    return Fisher(do, stores, out, task, weights, kind, by, shard, batch_size, device, threads, patience, quiet)


def run_fisher(options: Fisher) -> None:
    check_folder("out", options.out)
    if options.do == "merge":
        if not options.stores:
            raise InputError("stores", "must be the folders of shards: expunge fisher merge one two --out all", "none")
        with uninterrupted():
            from expunge.requests.sums_building import merge

        header: Header | None = merge(options.stores, options.out)
    else:
        header = _built(options)
    if header is None:
        return
    there = sum(header.file(f"group-{number}") is not None for number in range(len(header.groups)))
    state = "complete" if header.complete else "the other shards are to be merged with it"
    if header.dropped:
        state += f", without the samples of {counted(len(header.dropped), 'request')}"
    print(f"{options.out}: {there} of {len(header.groups)} groups, {header.samples} samples, {state}")


def _built(options: Fisher) -> Header | None:
    """The header of the store; None on all processes of a torchrun but the first, which speaks for all."""
    if options.stores:
        raise InputError("stores", "are for merge; build has none", options.stores[0])
    if options.task is None or options.weights is None:
        raise InputError("task" if options.task is None else "weights", "must be given to build a store", "none")
    number, shards = _shard(options.shard)
    with uninterrupted():
        from expunge.requests.grouping import Grouping, group_rows
        from expunge.requests.summing import Summing
        from expunge.requests.sums_building import build
        from expunge.requests.task import load_task
        from expunge.requests.weights import load_weights
        from expunge.runtime import processes
        from expunge.runtime.modes import device_named
        from expunge.validate import check_positive, check_whole

    check_whole("batch_size", options.batch_size, minimum=1)
    check_whole("threads", options.threads, minimum=1, maximum=1024)
    check_positive("patience", options.patience)
    task = load_task(options.task)

    def prepare() -> dict[str, str]:
        """Whatever fails here on one process is told to all."""
        task.model.to(device_named(options.device))
        load_weights(options.weights or "", task.model)
        prepared.append((Summing(task, task.model, options.kind, options.batch_size, options.threads), group_rows(task, options.by)))
        return {"task file": task.digest}

    with processes.of_torchrun(options.patience):
        prepared: list[tuple[Summing, Grouping]] = []
        processes.agree(prepare, options.patience)
        say, progress = ((lambda line: None), False) if options.quiet else (_say, None)
        header = build(options.out, *prepared[0], (number, shards), say, options.patience, progress)
        return header if processes.rank() == 0 else None


def _shard(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise InputError("shard", "must be NUMBER/OF, such as 2/4", text)
    return int(first), int(second)


def _say(line: str) -> None:
    print(on_one_line(line), file=sys.stderr, flush=True)
