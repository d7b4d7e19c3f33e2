"""Let a copy of a network re-learn for a few steps at a small rate, and see how much of the forgotten comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from expunge.audit.findings import Curve
from expunge.audit.settings import Settings
from expunge.data.batches import Batches, Data, as_batches
from expunge.data.objective import Batch, Objective
from expunge.data.parting import cuttable, first_batches
from expunge.errors import InputError
from expunge.metrics.relearning import RelearnCurve, relearn_curve
from expunge.model.copying import copied
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning


def relearn(network: nn.Module, sets: Mapping[str, Data], like: Tensor, settings: Settings, objective: Objective) -> Curve:
    """`like` are the rows of the test set that are like the forgotten. The network itself stays as it is."""
    parts = cuttable(sets["test"], "test", settings.batch_size)
    if parts is None:
        raise InputError("test", "must be a dataset or a loader of one for re-learning; else switch it off with Settings(rounds=0)")
    unseen = parts.at(like, True)
    together = both(sets["forget"], sets["remain"], settings.batch_size)
    tuning = Tuning(Constant(settings.rate, settings.rounds), batch_size=settings.batch_size, seed=settings.seed)
    steps = first_batches(together, "data", settings.batch_size, settings.steps)
    curve = relearn_curve(
        trainable(network), sets["forget"], unseen, steps, tuning, objective=objective, batch_size=settings.batch_size, progress=False
    )
    return plain(curve)


def trainable(network: nn.Module) -> nn.Module:
    """The network; where all of it is frozen, as networks that only answer often are, a copy that is not."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return network
    copy = copied(network)
    for parameter in copy.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return copy


def plain(curve: RelearnCurve) -> Curve:
    if not all(map(torch.isfinite, map(torch.tensor, curve.losses))):
        raise InputError("after", "must have a finite loss on the forget data to re-learn", "an infinite one")
    return Curve(curve.losses, curve.accuracies, curve.unseen)


def both(forget: Data, remain: Data, batch_size: int) -> Data:
    """All training data: datasets end to end; other forms batch by batch, one of the forget data after its share of the others."""
    if isinstance(forget, Dataset) and isinstance(remain, Dataset):
        return ConcatDataset([forget, remain])
    first, second = as_batches(forget, "forget", batch_size), as_batches(remain, "remain", batch_size)

    def read(seed: int | None) -> Iterator[Batch]:
        share = max(1, round(len(second) / len(first)))
        rest = second.read(seed)
        for batch in first.read(seed):
            yield batch
            yield from islice(rest, share)
        yield from rest

    return Batches(read, len(first) + len(second))
