"""Walk nested structures of tensors: batches, and what modules keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

# (inputs..., targets) as a tuple or list, or a mapping with a label key; anything, with an Objective of one's own.
Batch = Any
PLAIN = {type(None), bool, int, float, str, bytes}  # holds nothing


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with `change` applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def tensors(nested: Any) -> list[Tensor]:
    """Every tensor of a batch, or of whatever else is nested like one."""
    found: list[Tensor] = []
    _gather(nested, found)
    return found


def _gather(entry: Any, found: list[Tensor]) -> None:
    """Asked of every operation that is watched: no generators, and a Mapping is asked for last."""
    if isinstance(entry, Tensor):
        found.append(entry)
    elif isinstance(entry, (tuple, list)):
        for part in entry:
            _gather(part, found)
    elif type(entry) not in PLAIN and isinstance(entry, Mapping):
        for part in entry.values():
            _gather(part, found)


def combine_tensors(batches: Sequence[Batch], change: Callable[[Sequence[Tensor]], Tensor]) -> Batch:
    """Combine several batches of one form into one: `change` makes one tensor of those at the same place; all else is the first's."""
    first = batches[0]
    if isinstance(first, Tensor):
        return change(batches)
    if isinstance(first, Mapping):
        if any(batch.keys() != first.keys() for batch in batches):
            raise ValueError(f"keys {', '.join(map(str, first))} and others")
        return {key: combine_tensors([batch[key] for batch in batches], change) for key in first}
    if isinstance(first, (tuple, list)):
        parts = [combine_tensors(column, change) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def leaves(entry: Any) -> Iterator[Any]:
    """What an entry holds, however nested; strings and missing values are left out."""
    if isinstance(entry, Tensor):
        yield entry
    elif isinstance(entry, (tuple, list)):
        for part in entry:
            yield from leaves(part)
    elif isinstance(entry, Mapping):
        for part in entry.values():
            yield from leaves(part)
    elif entry is not None and not isinstance(entry, (str, bytes)):
        yield entry
