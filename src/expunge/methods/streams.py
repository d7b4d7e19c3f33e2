"""Combine forget and remain data in one training: samples of both in every batch, or a batch of each per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from expunge.data.batches import Batches, batch_size, joined, take
from expunge.data.objective import Batch
from expunge.errors import InputError
from expunge.training.single_samples import SingleSampleFilter

ONE_FORM = "batches of forget and remain data must have one form and shape, to be mixed"


def tagged(batches: Batches, tags: Callable[[Batch], Tensor]) -> Batches:
    """(batch, tags) for every batch, with one tag per sample: a label to learn, or a teacher."""
    return batches.changed(lambda seed: ((batch, tags(batch)) for batch in batches.read(seed)))


def mixed(forget: Batches, remain: Batches) -> Batches:
    """Every remain batch with an even share of the forget samples, which come once per epoch, in another order each time.

    The forget data are read once, here, and kept in memory.
    """
    forget_samples = joined([*iter(forget)], "forget", ONE_FORM)
    samples, steps = batch_size(forget_samples), len(remain)

    def read(seed: int | None) -> Iterator[Batch]:
        step = -1
        order = torch.arange(samples) if seed is None else torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        for step, batch in enumerate(remain.read(seed)):
            share = order[step * samples // steps : (step + 1) * samples // steps]
            yield joined([batch, take(forget_samples, share)], "forget", ONE_FORM) if len(share) else batch
        if step + 1 < steps:
            raise InputError("remain", f"must give {steps} batches, its length, for the forget data to be among them", step + 1)

    return Batches(read, steps)


def interleaved(forget: Batches, remain: Batches, remain_steps: int, single_samples: SingleSampleFilter) -> Batches:
    """(batch, marks): a batch of the forget data, which are cycled, before every `remain_steps` remain batches.

    Marks are (N, 1) beside forget samples and (N, 0) beside remain samples: to read a value would make a GPU wait, a shape does not.
    """
    steps = len(remain)

    def read(seed: int | None) -> Iterator[Batch]:
        forget_batches = cycled(forget, "forget", seed or 0, single_samples)
        for step, batch in enumerate(remain.read(seed)):
            if step % remain_steps == 0:
                forget_batch = next(forget_batches)
                yield forget_batch, torch.ones(batch_size(forget_batch), 1)
            yield batch, torch.ones(batch_size(batch), 0)

    return Batches(read, steps + -(-steps // remain_steps))


def cycled(batches: Batches, argument: str, seed: int, single_samples: SingleSampleFilter) -> Iterator[Batch]:
    """Endless batches, pass after pass, every pass in another order; batches that BatchNorm would refuse are skipped."""
    for epoch_seed in count(seed):
        yield from single_samples.kept(batches.shuffled(epoch_seed), argument)
