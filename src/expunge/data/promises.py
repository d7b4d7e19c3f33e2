"""Check that data give as many batches and samples as they promise: data that end early would go unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from expunge.data.objective import Batch
from expunge.errors import InputError
from expunge.runtime.nested import tensors

AGAIN = "a loader must give its batches each time it is read; give a list of batches instead"
UNEQUAL = ("stack expects each tensor to be equal size", "batch must contain tensors", "batch should be of equal size")  # default_collate
EARLY = "a StopIteration while a sample or a batch is made ends data early, and so does a __len__ that is an estimate"


class Learned:
    """The number of batches of data without a length: known once they were read to the end, and the same from then on."""

    def __init__(self) -> None:
        self.number: int | None = None


def promised_batches(loader: DataLoader[Any]) -> int | Learned:
    """The number of batches a loader says it has; unknown for a stream with several workers, each of which ends with its own batch."""
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:
        return Learned()
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return Learned()


def promised_samples(loader: DataLoader[Any]) -> int | None:
    """The number of samples a loader says it has; None where that is unknown: a `collate_fn` may skip some, a custom batch sampler may
    take any, and a stream may drop its last batch."""
    stream = isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or loader.collate_fn is not default_collate or (stream and loader.drop_last):
        return None
    try:
        samples = len(loader.dataset if stream else loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return samples - samples % loader.batch_size if loader.drop_last else samples


def delivered(
    loader: DataLoader[Any], length: int | Learned, samples: int | None, size: Callable[[Batch], int], argument: str
) -> Iterator[Batch]:
    """The batches of a loader, neither more nor fewer than it promises; `size` counts the samples of a batch."""
    promised = length.number if isinstance(length, Learned) else length
    number = read = 0
    for number, batch in enumerate(unbroken(iter(loader), argument), start=1):
        if promised is not None and number > promised:
            rule = f"a loader must not give more batches than {'before' if isinstance(length, Learned) else 'its length'}"
            raise InputError(argument, rule, f"more than {promised}")
        read += 0 if samples is None else size(batch)
        yield batch
    if not number and (promised is None or isinstance(loader.dataset, IterableDataset)):
        raise InputError(argument, f"must not be empty; {AGAIN}" if promised is None else AGAIN, "none")
    if promised is not None and number < promised:
        kept = "as many as before" if isinstance(length, Learned) else "its length"
        raise InputError(argument, f"must give {promised} batches, {kept}, each time it is read ({EARLY})", number)
    if samples is not None and read != samples:
        raise InputError(argument, f"must give the {samples} samples that its length promises ({EARLY})", read)
    if isinstance(length, Learned):
        length.number = number


def unbroken(batches: Iterable[Batch], argument: str) -> Iterator[Batch]:
    """The same batches; a generator that a StopIteration broke off is a mistake in the data, which are named."""
    try:
        yield from batches
    except (RuntimeError, IndexError, TypeError) as error:
        raise_if_broken_off(error, argument)
        raise


def raise_if_broken_off(error: BaseException, argument: str) -> None:
    """Python makes a RuntimeError of a StopIteration inside a generator, of which a worker process sends the text; an IndexError says that
    there is no such sample, and some others that samples make no batch."""
    if isinstance(error, StopIteration) or "generator raised StopIteration" in str(error):
        raise InputError(argument, f"must give every sample it promises ({EARLY})", "StopIteration") from error
    text = (str(error).strip().splitlines() or [""])[-1]
    if any(reason in text for reason in UNEQUAL):
        raise InputError(argument, "samples must be tensors or numbers of one shape, or a loader needs a collate_fn", text) from error
    if isinstance(error, IndexError):
        raise InputError(argument, "must give every sample it promises", f"IndexError: {text}") from error


def listed(data: Iterable[Batch], argument: str) -> list[Batch]:
    """All batches, kept in memory."""
    batches, versions = list[Batch](), dict[int, int]()
    for batch in unbroken(iter(data), argument):
        for tensor in filter(_has_version, tensors(batch)):
            if versions.setdefault(tensor.data_ptr(), tensor._version) != tensor._version:
                rule = "an iterator is kept in memory, so it must not write to what it gave: yield new tensors, such as x.clone()"
                raise InputError(argument, rule, f"batch {len(batches)} in the memory of an earlier one")
        batches.append(batch)
    if isinstance(data, Sized) and len(batches) != len(data):
        raise InputError(argument, f"must give {len(data)} batches, its length ({EARLY})", len(batches))
    return batches


def _has_version(tensor: Tensor) -> bool:
    """Whether it has memory, and torch counts how often that was written to."""
    return tensor.layout is torch.strided and not tensor.is_inference() and not tensor.is_nested and tensor.numel() > 0
