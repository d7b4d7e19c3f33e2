"""Hold some samples of data apart from the others, in whatever form the data are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

from expunge.data.batches import Batches, Data, as_batches, batch_size, take
from expunge.data.objective import Batch
from expunge.data.samplers import loader_rows
from expunge.errors import InputError

LOADER = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator")


@dataclass(frozen=True)
class Cuttable:
    """Data whose samples can be taken by number: `at(numbers, ordered)` are some of them, in the form of the data.

    `ordered`: all of them and in this order, whatever a loader shuffles and drops.
    """

    samples: int
    at: Callable[[Tensor, bool], Data]


def cuttable(data: Data, argument: str, size: int) -> Cuttable | None:
    """Datasets, lists of batches, and loaders that read a dataset by one of torch's own samplers; None for others.

    `size` is that of the batches a dataset is cut into.
    """
    batches = as_batches(data, argument, size)
    if isinstance(batches.source, DataLoader):
        return _of_loader(batches.source, argument)
    if batches.source is not None:
        return Cuttable(len(batches.source), lambda numbers, ordered: Subset(batches.source, numbers.tolist()))
    return _of_list(batches)


def drawn_apart(labels: Tensor | int, share: float, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers of samples to keep and of those held apart, drawn by chance: the `share`, at most `most`.

    Of every label one sample is kept at least. `labels` may be the number of samples alone.
    """
    samples = labels if isinstance(labels, int) else len(labels)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    may = torch.ones(samples, dtype=torch.bool)
    if isinstance(labels, Tensor):
        drawn = labels.cpu()[order]
        may[[int(order[(drawn == label).nonzero()[-1]]) for label in drawn.unique().tolist()]] = False
    held = order[may[order]][: min(int(share * samples), most)].sort().values
    kept = torch.ones(samples, dtype=torch.bool)
    kept[held] = False
    return kept.nonzero().flatten(), held


def first_batches(data: Data, argument: str, size: int, steps: int) -> Batches:
    """No more than so many batches in every pass."""
    batches = as_batches(data, argument, size)

    def read(seed: int | None) -> Any:
        return (batch for _, batch in zip(range(steps), batches.read(seed), strict=False))

    return Batches(read, min(steps, len(batches)))


def _of_loader(loader: DataLoader[Any], argument: str) -> Cuttable | None:
    plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    sampler = loader.sampler
    repeats = type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source))
    if not plain or repeats or type(sampler) not in (SequentialSampler, RandomSampler, SubsetRandomSampler):
        return None
    rows = loader_rows(loader, argument)
    if rows is None:
        return None
    settings = {name: getattr(loader, name) for name in LOADER}
    shuffled = type(sampler) is not SequentialSampler

    def at(numbers: Tensor, ordered: bool) -> Data:
        part = Subset(loader.dataset, rows[numbers].tolist())
        own = settings | {"drop_last": loader.drop_last and not ordered}
        return DataLoader(part, loader.batch_size, shuffle=shuffled and not ordered, **own)

    return Cuttable(len(rows), at)


def _of_list(batches: Batches) -> Cuttable | None:
    listed: Sequence[Batch] = [*batches]
    try:
        sizes = [batch_size(batch) for batch in listed]
    except InputError:  # of one's own objective: not to be cut
        return None
    ends = torch.tensor(sizes).cumsum(0)

    def at(numbers: Tensor, ordered: bool) -> Data:
        batch_of = torch.bucketize(numbers, ends, right=True)
        parts = [(number, numbers[batch_of == number] - (ends[number] - sizes[number])) for number in batch_of.unique().tolist()]
        return [take(listed[number], rows) for number, rows in parts]

    return Cuttable(int(ends[-1]), at)
