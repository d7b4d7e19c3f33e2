"""Walk nested structures of tensors: batches, and what modules keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

# (inputs..., targets) as a tuple or list, or a mapping with a label key; anything, with an Objective of one's own.
Batch = Any


def each_tensor(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with every tensor in it changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(each_tensor(value, change) for value in batch)
    return batch


def tensors(nested: Any) -> list[Tensor]:
    """Every tensor of a batch, or of whatever else is nested like one."""
    return [leaf for leaf in leaves(nested) if isinstance(leaf, Tensor)]


def each_place(batches: Sequence[Batch], change: Callable[[Sequence[Tensor]], Tensor]) -> Batch:
    """One batch out of several of the same form: the tensors at each place, in mappings by key, made into one; all else from the first."""
    first = batches[0]
    if isinstance(first, Tensor):
        return change(batches)
    if isinstance(first, Mapping):
        if any(batch.keys() != first.keys() for batch in batches):
            raise ValueError(f"keys {', '.join(map(str, first))} and others")
        return {key: each_place([batch[key] for batch in batches], change) for key in first}
    if isinstance(first, (tuple, list)):
        parts = [each_place(column, change) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def leaves(entry: Any) -> Iterator[Any]:
    """What an entry holds, however nested; strings and missing values are left out."""
    if isinstance(entry, (Mapping, tuple, list)):
        for part in entry.values() if isinstance(entry, Mapping) else entry:
            yield from leaves(part)
    elif entry is not None and not isinstance(entry, (str, bytes)):
        yield entry
