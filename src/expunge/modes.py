"""Train and eval mode, random numbers and threads, borrowed and given back: also after an exception."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All of the model in train or eval mode; afterwards every module in its own again."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of torch (the CPU's and the device's), numpy and Python from `seed`; afterwards as if none had been drawn."""
    devices = [device] if device.type == "cuda" else []
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            # Not torch.manual_seed: it would also reseed devices that are not ours to restore.
            torch.default_generator.manual_seed(seed)
            for each in devices:
                with torch.cuda.device(each):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on a single CPU thread: as fast for small networks, the same result on any number of cores, and no waiting on a busy one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
