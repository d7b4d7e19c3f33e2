"""Run the small networks of an audit on one CPU thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from expunge.data.batches import Data, as_batches, batch_size
from expunge.errors import InputError
from expunge.runtime.modes import one_thread
from expunge.runtime.nested import tensors

SMALL = 2 * 10**7  # weights times numbers of a sample: 5·10⁶ for the digits' ResNet, 8·10⁸ for ResNet20 on CIFAR-10


def fitting_threads(network: nn.Module, data: Data) -> Callable[[], AbstractContextManager[None]]:
    """One thread for a small network on small samples, else as many as torch has.

    Two threads are no faster there, and on a busy machine each waits for the other: 3 s of an audit of the digits became 76 s.
    """
    batch = next(iter(as_batches(data, "forget", 1)))
    try:
        numbers = sum(tensor.numel() for tensor in tensors(batch)) / batch_size(batch)
    except InputError:  # an objective of one's own may take batches whose samples cannot be counted
        return nullcontext
    weights = sum(parameter.numel() for parameter in network.parameters())
    return one_thread if weights * numbers <= SMALL else nullcontext
