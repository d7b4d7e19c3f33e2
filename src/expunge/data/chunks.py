"""Cut data into chunks of fixed batches, the same ones however many processes share the work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from expunge.data.batches import Batches, Data, as_batches, first_dimension, read_batches, row_reader
from expunge.data.cursors import Cursor
from expunge.data.digest import add_batch, data_digest
from expunge.data.objective import Batch
from expunge.data.streams import Shards
from expunge.errors import InputError
from expunge.runtime.display import counted
from expunge.runtime.modes import seeded
from expunge.storage.tensors import add_bytes
from expunge.validate import check_whole, is_whole

BATCHES = 32  # of a chunk: with 128 samples each, the start of a chunk (0.1 s for a ResNet20) is 1 % of its work
SPREAD = 64  # samples of which the bytes are compared where a dataset does not show its tensors
ALL = "all"  # the name of the only group


@dataclass(frozen=True)
class Chunks:
    """The chunks in their order. `read(number)` gives the batches of one; `groups` names its group, those of a group in a row.

    `digest()` is of all that fixes the chunks: the data, their order, the sizes of the batches and the groups. It reads all tensors that
    the data show, so a process that is alone and keeps nothing does without. `sizes` says in words what numbers fix them. `stream` is the
    cursor of data that can only be read from their beginning.
    """

    read: Callable[[int], Batches]
    groups: Sequence[str]
    digest: Callable[[], str]
    sizes: str
    stream: Cursor | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def described(self) -> dict[str, str]:
        """What processes that share the chunks must have the same of: the first that differs is named in an error."""
        return {"number of samples or batch size": self.sizes, "data (values, order or groups)": self.digest()}


def cut(
    data: Data,
    batch_size: int = 128,
    batches_per_chunk: int = BATCHES,
    groups: Sequence[Any] | Tensor | None = None,
    argument: str = "data",
) -> Chunks:
    """Chunks of `batches_per_chunk` batches, in the order of the data; the last of a group may be smaller. No sample is in two.

    A dataset with a length is cut into batches of `batch_size`; a loader that reads one in order keeps its batch size and its workers; a
    list of batches keeps its batches. A source of `Shards` is a chunk. An IterableDataset, or a loader of one, is read from its start by
    every process, which leaves out the chunks of others; its first chunk is read once more before, and where it has no length all of it, to
    count. With `groups`, one name or number per sample of a dataset, a chunk holds samples of one group: groups come in the order of their
    names (numbers by size), samples in the order of the data.
    """
    check_whole("batch_size", batch_size, minimum=1)
    check_whole("batches_per_chunk", batches_per_chunk, minimum=1)
    if isinstance(data, Shards):
        return _of_shards(data, int(batch_size), groups, argument)
    if isinstance(data, IterableDataset) or (isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)):
        return _of_stream(as_batches(data, argument, int(batch_size)), int(batches_per_chunk), groups, argument)
    if isinstance(data, DataLoader):
        return _of_loader(data, int(batches_per_chunk), groups, argument)
    batches = as_batches(data, argument, int(batch_size))
    if batches.source is None:
        return _of_batches(list(batches), int(batches_per_chunk), groups, argument)
    reader = row_reader(batches.source, argument)

    def read(rows: Tensor) -> Batches:
        parts = rows.split(int(batch_size))
        return Batches(lambda seed: read_batches(reader, parts, argument), len(parts))

    return _of_rows(batches.source, len(batches.source), int(batch_size), int(batches_per_chunk), groups, read, argument)


def _of_rows(
    dataset: Any, samples: int, batch_size: int, per_chunk: int, groups: Any, read: Callable[[Tensor], Batches], argument: str
) -> Chunks:
    size = batch_size * per_chunk
    if groups is None:
        count = -(-samples // size)

        def rows_of(number: int) -> Tensor:
            return torch.arange(number * size, min(samples, (number + 1) * size))

        def grouped() -> str:
            return ""

        names: list[str] = [ALL] * count
    else:
        parts = [(name, rows) for name, members in _members(groups, samples) for rows in members.split(min(size, samples))]

        def rows_of(number: int) -> Tensor:
            return parts[number][1]

        def grouped() -> str:
            digest = hashlib.sha256()
            for name, rows in parts:
                digest.update(f"{name}|".encode(errors="surrogatepass"))
                add_bytes(digest, rows)
            return digest.hexdigest()

        names = [name for name, _ in parts]
    sizes = f"{counted(samples, 'sample')}, batches of {batch_size}, {per_chunk} per chunk"

    def described() -> str:
        return hashlib.sha256(f"{sizes}, {grouped()}, {fingerprint(dataset, samples, argument)}".encode()).hexdigest()

    return Chunks(lambda number: read(rows_of(number)), names, described, sizes)


def _of_loader(loader: DataLoader[Any], per_chunk: int, groups: Any, argument: str) -> Chunks:
    """Each chunk is a loader of its own over its rows, with the same batch size, collate function and workers."""
    if type(loader.sampler) is not SequentialSampler or loader.batch_size is None:
        rule = "a loader must read its dataset in order (shuffle=False) in batches of one size to be shared; give the dataset instead"
        raise InputError(argument, rule, type(loader.sampler if loader.batch_size else loader.batch_sampler).__name__)
    as_batches(loader, argument)  # its checks
    dataset, size = loader.dataset, loader.batch_size
    samples = len(dataset)  # type: ignore[arg-type]
    kept = samples - samples % size if loader.drop_last else samples
    options = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory, "worker_init_fn": loader.worker_init_fn}

    def read(rows: Tensor) -> Batches:
        part = DataLoader(Subset(dataset, rows.tolist()), size, collate_fn=loader.collate_fn, **options)  # type: ignore[arg-type]
        return as_batches(part, argument)

    return _of_rows(dataset, kept, size, per_chunk, groups, read, argument)


def _of_batches(batches: list[Batch], per_chunk: int, groups: Any, argument: str) -> Chunks:
    _refuse(groups, batches)

    def digest() -> str:
        total = hashlib.sha256(f"{per_chunk} per chunk|".encode())
        for batch in batches:
            add_batch(total, batch)
        return total.hexdigest()

    def read(number: int) -> Batches:
        part = batches[number * per_chunk : (number + 1) * per_chunk]
        return Batches(lambda seed: iter(part), len(part))

    samples = counted(sum(map(first_dimension, batches)), "sample")
    sizes = f"{samples} in {counted(len(batches), 'batch', 'batches')}, {per_chunk} per chunk"
    return Chunks(read, [ALL] * -(-len(batches) // per_chunk), digest, sizes)


def _of_shards(shards: Shards, batch_size: int, groups: Any, argument: str) -> Chunks:
    """The digest is of the files' names, sizes and some of their bytes, and of the first samples of some sources."""
    _refuse(groups, shards)

    def digest() -> str:
        total = hashlib.sha256(f"{batch_size}|{shards.described()}|".encode())
        for number in _spread(len(shards.sources)):
            for batch in islice(shards.batches(number, 1, argument), 1):
                add_batch(total, batch)
        return total.hexdigest()

    sizes = f"{counted(len(shards.sources), 'source')}, batches of {batch_size}"
    return Chunks(lambda number: shards.batches(number, batch_size, argument), [ALL] * len(shards.sources), digest, sizes)


def _of_stream(batches: Batches, per_chunk: int, groups: Any, argument: str) -> Chunks:
    """The digest is of the whole stream where it has no length, for then it is read to count; else of the first chunk and the length."""
    _refuse(groups, batches.source)
    cursor = Cursor(batches, per_chunk, argument)
    length = cursor.look()
    digest = hashlib.sha256(f"{per_chunk} per chunk|{length} batches|{cursor.digests}".encode()).hexdigest()
    sizes = f"{counted(length, 'batch', 'batches')}, {per_chunk} per chunk"
    return Chunks(cursor.part, [ALL] * -(-length // per_chunk), lambda: digest, sizes, cursor)


def _refuse(groups: Any, data: Any) -> None:
    if groups is not None:
        raise InputError("groups", "needs a dataset, of which single samples can be taken", type(data).__name__)


def _spread(size: int) -> list[int]:
    return torch.linspace(0, size - 1, min(SPREAD, size), dtype=torch.float64).round().long().unique().tolist()


def _members(groups: Any, samples: int) -> Iterator[tuple[str, Tensor]]:
    """Each group's name and rows, groups in the order of their names."""
    unordered = isinstance(groups, (str, bytes, Mapping, Set)) or not isinstance(groups, Iterable)
    values = groups.tolist() if hasattr(groups, "tolist") else None if unordered else list(groups)
    if not isinstance(values, list) or len(values) != samples:
        raise InputError("groups", f"must hold a name or whole number for each of the {samples} samples", type(groups).__name__)
    if all(map(is_whole, values)):
        values = [int(value) for value in values]  # numpy's, which a list may hold
    kinds = {type(value) for value in values}
    if kinds not in ({int}, {str}):
        raise InputError("groups", "must be whole numbers or names, all of one kind", sorted(kind.__name__ for kind in kinds))
    names = sorted(set(values))
    places = {name: place for place, name in enumerate(names)}
    member = torch.tensor([places[value] for value in values])
    order = torch.argsort(member, stable=True)
    for name, rows in zip(names, order.split(torch.bincount(member).tolist()), strict=True):
        yield str(name), rows


def fingerprint(dataset: Any, samples: int, argument: str) -> str:
    """All bytes of the tensors that a dataset shows, and those of some samples spread over it, which may be read from anywhere."""
    digest, reader = hashlib.sha256(f"{data_digest(dataset)}|".encode()), row_reader(dataset, argument)
    with seeded(0, torch.device("cpu")):
        for row in _spread(samples):
            try:
                add_batch(digest, reader(torch.tensor([row])))
            except InputError:  # samples that only the loader's own function can collate
                continue
    return digest.hexdigest()
