"""Read inputs and labels that are whole tensors or arrays, as in (x, y), as a dataset."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from expunge.errors import InputError


def as_dataset(data: Any, argument: str) -> Any:
    """A tuple of tensors or NumPy arrays of one length is read as the columns of a dataset; all other data are returned as they are.

    A list is a list of batches, and so is a tuple of anything else. Columns of several lengths raise InputError.
    """
    if type(data) is not tuple or len(data) < 2 or not all(isinstance(column, (Tensor, numpy.ndarray)) for column in data):
        return data
    if not all(column.ndim for column in data):
        return data
    lengths = [len(column) for column in data]
    if len({*lengths}) > 1:
        rule = "the entries of a tuple (inputs, labels) must have one length, that of all samples; give batches as a list"
        raise InputError(argument, rule, f"lengths of {', '.join(map(str, lengths))}")
    if not lengths[0]:
        return data
    return TensorDataset(*(_tensor(column, argument) for column in data))


def _tensor(column: Tensor | numpy.ndarray, argument: str) -> Tensor:
    """As a tensor, without a copy where torch can share an array's memory."""
    if isinstance(column, Tensor):
        return column
    shared = column.flags.writeable and all(step >= 0 for step in column.strides)
    try:
        return torch.from_numpy(column if shared else column.copy())
    except TypeError as error:
        raise InputError(argument, "arrays must hold numbers that torch has", f"an array of {column.dtype}") from error
