"""Measure accuracy and mean loss chunk by chunk: by any number of processes with the same bits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from expunge.data.batches import Data, device_of, to_device
from expunge.data.batches import batch_size as size_of
from expunge.data.chunk_passes import fold
from expunge.data.chunks import BATCHES, Chunks, cut
from expunge.data.labels import as_labels, has_label
from expunge.data.objective import Objective, check_objective
from expunge.errors import InputError, naming
from expunge.fisher.naming import objective_name
from expunge.metrics.accuracy import check_numbers, check_targets
from expunge.model.checks import check_module, check_unsharded
from expunge.model.copying import unwrapped
from expunge.runtime.modes import in_mode, seeded, unchanged
from expunge.runtime.processes import PATIENCE
from expunge.storage.folding import Sums
from expunge.storage.tensors import weights_digest
from expunge.validate import check_positive, check_whole


@dataclass(frozen=True)
class Measured:
    """How many labels are the largest logit, how many labels there are, the sum of the losses and the number of samples."""

    right: int
    labels: int
    loss: float
    samples: int

    @property
    def accuracy(self) -> float:
        """right / labels"""
        if not self.labels:
            raise InputError("data", "must hold at least one label, and the outputs must be class logits")
        return self.right / self.labels

    @property
    def mean_loss(self) -> float:
        """loss / samples"""
        return self.loss / self.samples


def by_chunks(
    model: nn.Module,
    data: Data,
    objective: Objective = Objective(),
    *,
    batch_size: int = 128,
    batches_per_chunk: int = BATCHES,
    keep: str | os.PathLike[str] | None = None,
    threads: int = 1,
    patience: float = PATIENCE,
) -> Measured:
    """`accuracy` and `mean_loss` of a model, in eval mode, shared by all processes of a torchrun as `fisher.by_chunks` is.

    Every sample counts once, and the numbers are the same bits for any number of processes on one type of machine. Where the outputs are
    not class logits, no labels are counted. NaN among the logits or losses raises `DivergedError`.
    """
    model = unwrapped(model)
    check_positive("patience", patience)

    def prepare() -> tuple[Chunks, Mapping[str, str]]:
        check_module(model)
        check_unsharded(model, "use metrics.accuracy, on all processes with the same data")
        check_objective(objective)
        check_whole("threads", threads, minimum=1, maximum=1024)
        settings = {"weights": weights_digest(model), "objective": objective_name(objective, "empirical"), "device": device_of(model).type}
        return cut(data, batch_size, batches_per_chunk), settings

    def work(chunks: Chunks, number: int) -> Sums:
        return _measured(model, chunks, number, objective)

    with fold(prepare, work, keep, cpu_threads=threads, patience=patience) as totals:
        (total,) = totals.values()
    right, labels = (int(total.sums[name]) for name in ("right", "labels"))
    return Measured(right, labels, float(total.sums["loss"]), total.count)


def _measured(model: nn.Module, chunks: Chunks, number: int, objective: Objective) -> Sums:
    device, samples = device_of(model), 0
    right, labels, loss, broken = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(4))
    with naming("data"), seeded(0, device), in_mode(model, training=False), unchanged(model), torch.no_grad():
        for batch in chunks.read(number):
            batch = to_device(batch, device)
            logits, targets = objective.logits(model, batch), objective.targets(batch)
            losses = objective.per_sample(logits.double(), targets)
            rows = losses.isnan()
            if objective.of_classes and not targets.is_floating_point():
                targets = as_labels(targets)
                check_targets(logits, targets)
                valid = has_label(targets)
                largest, predicted = logits.max(1)
                right += ((predicted == targets) & valid).sum()
                labels += valid.sum()
                rows = rows | (largest.isnan() & valid).reshape(len(rows), -1).any(1)
            loss += losses.sum()
            broken += rows.sum()
            samples += size_of(batch)
    check_numbers("the logits or losses", int(broken), samples)
    return Sums({"right": right.cpu(), "labels": labels.cpu(), "loss": loss.cpu()}, samples)
