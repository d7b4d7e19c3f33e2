"""Forget and remain data in one training: samples of both in every batch, or one beside the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from expunge.data.batches import Batches, batch_size, joined, take
from expunge.data.objective import Batch
from expunge.errors import InputError
from expunge.training.single_samples import Lone

ONE_FORM = "batches of forget and remain data must have one form and shape, to be mixed"


def tagged(batches: Batches, tags: Callable[[Batch], Tensor]) -> Batches:
    """(batch, tag) for each batch, with one tag a sample: a label to learn, or a teacher."""
    return batches.changed(lambda seed: ((batch, tags(batch)) for batch in batches.read(seed)))


def mixed(few: Batches, many: Batches) -> Batches:
    """Every batch of `many` with its even share of the samples of `few`, which come once an epoch, in another order each time.

    The few are read once, here, and kept in memory.
    """
    whole = joined([*iter(few)], "forget", ONE_FORM)
    samples, steps = batch_size(whole), len(many)

    def read(seed: int | None) -> Iterator[Batch]:
        step = -1
        order = torch.arange(samples) if seed is None else torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        for step, batch in enumerate(many.read(seed)):
            share = order[step * samples // steps : (step + 1) * samples // steps]
            yield joined([batch, take(whole, share)], "forget", ONE_FORM) if len(share) else batch
        if step + 1 < steps:
            raise InputError("remain", f"must give {steps} batches, its length, for the forget data to be among them", step + 1)

    return Batches(read, steps)


def cycled(batches: Batches, argument: str, seed: int, lone: Lone) -> Iterator[Batch]:
    """Batches without end, pass after pass, each in an order of its own; without those that BatchNorm would refuse."""
    for turn in count(seed):
        yield from lone.kept(batches.shuffled(turn), argument)
