"""Shrink the weights that matter more to the forget data than to all data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from expunge import curvature, fisher
from expunge.data.batches import Batches, Data, as_batches, read_batches, row_reader
from expunge.data.classes import no_labels
from expunge.data.objective import Batch, Objective
from expunge.editing.patches import Patch
from expunge.errors import NoEffectWarning
from expunge.fisher import FisherSums
from expunge.fisher.naming import objective_name
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.model.checks import screened
from expunge.runtime.callers import level_of_caller
from expunge.storage.tensors import weights_digest
from expunge.training.tuning import Tuning
from expunge.validate import check_choice, check_number, make_plain

RELEASED_BATCH_SIZE = 64
Importance = Mapping[str, Tensor]  # a mean over samples, by parameter


@dataclass(frozen=True)
class SSD:
    """Selective synaptic dampening: shrink each weight by how much less it matters to all data than to the forget data.

    w_j ← min(λ·F̄_D,j / F̄_f,j, 1)·w_j where F̄_f,j > α·F̄_D,j, with F̄ the mean over the forget data and over all data D, the classifier
    included. `threshold` is α, `dampening` λ. Foster et al. 2024, arXiv:2308.07707.

    The default α is too high for large forget sets: no weight has F̄_f > (n/n_f)·F̄_D, since D contains the forget data. α must be
    below n/n_f; for one of ten equal classes that is 10, and α = 10 changes next to nothing. See docs/dampening.md for how to choose it.

    Defaults: α = 10, λ = 1, those of their class removal (of 20 classes or more); no fine-tuning.
    Departures: their program squares gradients of batches, which depend on the order of the data: `as_released()`.
    """

    threshold: float = 10.0
    dampening: float = 1.0
    kind: Literal["empirical", "expected", "loss-batch"] = "empirical"
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for argument, value in (("threshold", self.threshold), ("dampening", self.dampening)):
            check_number(argument, value, 0, ends="[]", rule="must be 0 or more")
        check_choice("kind", self.kind, ("empirical", "expected", "loss-batch"))
        check_tuning(self.tuning)
        make_plain(self)

    @classmethod
    def as_released(cls, threshold: float = 10.0, dampening: float = 1.0, tuning: Tuning | None = None) -> SSD:
        """The importance of the authors' released program: squared gradients of the mean loss of batches of 64, averaged over batches.

        Such squares depend on which samples share a batch. To forget classes the program reads the data class by class, and so does this:
        where no label is in both sets, a dataset is read in the order of its labels. Batches of a loader or a list are taken as they are;
        order them by class too. Where the sets share labels (single samples to forget) the order is the data's own, as there.
        """
        return cls(threshold, dampening, "loss-batch", tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "SSD")

        sets = _class_by_class({"forget": forget, "remain": remain}, run) if self.kind == "loss-batch" else {}

        def measure(data: Data, argument: str) -> FisherSums:
            if self.kind == "loss-batch":
                return batch_importance(model, screened(sets[argument], argument, run.objective), run.objective)
            batches = run.batches(data, argument)
            return fisher.diagonal(model, batches, kind=self.kind, objective=run.objective, progress=run.progress)

        forget_sums = measure(forget, "forget")
        forgotten, everything = forget_sums.mean(), (forget_sums + measure(remain, "remain")).mean()
        patch = run.edit(model, dampened(model, forgotten, everything, self.threshold, self.dampening))
        warn_if_unchanged(patch)
        run.train(model, remain, self.tuning)
        return patch


def dampened(model: nn.Module, forgotten: Importance, everything: Importance, threshold: float, dampening: float) -> dict[str, Tensor]:
    """New values of the weights: min(λ·F̄_D / F̄_f, 1)·w where F̄_f > α·F̄_D, and w elsewhere, so also where both are 0."""
    values = {}
    for name, importance in forgotten.items():
        shrunk = (dampening * everything[name] / importance).clamp(max=1)
        weight = model.get_parameter(name).detach().double()
        values[name] = torch.where(importance > threshold * everything[name], shrunk, 1.0) * weight
    return values


def warn_if_unchanged(patch: Patch) -> None:
    """Warn if no weight was dampened: what is returned then is the model as it was."""
    if not len(patch):
        rule = "no weight matters so much more to the forget data than to all data"
        warnings.warn(f"nothing was dampened: {rule}", NoEffectWarning, stacklevel=level_of_caller())


def batch_importance(model: nn.Module, batches: Batches, objective: Objective) -> FisherSums:
    """Σ_b (∂ mean_{n in b} ℓ_n)² over batches b, and their number: a square of a mean, which changes with the batch size."""
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in model.named_parameters() if value.requires_grad}
    for batch in batches:
        gradient, _ = curvature.gradient(model, _alone(batch), objective)
        for name, total in sums.items():
            total.add_(gradient[name].square())
    return FisherSums(sums, len(batches), "loss-batch", weights_digest(model), objective_name(objective, "loss-batch"))


def _class_by_class(sets: dict[str, Data], run: Run) -> dict[str, Batches]:
    """Batches of each set in the order of its labels where no label is in both; data without labels, or in batches, stay as they are."""
    cut = {argument: as_batches(data, argument, RELEASED_BATCH_SIZE) for argument, data in sets.items()}
    labels = {argument: column for argument, batches in cut.items() if (column := _labels(batches, argument, run)) is not None}
    if len(labels) < len(cut) or set.intersection(*({*column.tolist()} for column in labels.values())):
        return cut
    return {argument: _in_order(batches, labels[argument].argsort(stable=True), argument) for argument, batches in cut.items()}


def _labels(batches: Batches, argument: str, run: Run) -> Tensor | None:
    """One integer label per sample, in the order of the data; None where there are no such labels."""
    parts = []
    for batch in screened(batches, argument, run.objective):
        targets = run.objective.targets(batch)
        if not isinstance(targets, Tensor) or targets.dim() != 1 or no_labels(run.objective, run.logits, targets):
            return None
        parts.append(targets.detach().cpu())
    return torch.cat(parts)


def _in_order(batches: Batches, rows: Tensor, argument: str) -> Batches:
    if batches.source is None or isinstance(batches.source, DataLoader):
        return batches
    read, parts = row_reader(batches.source, argument), rows.split(RELEASED_BATCH_SIZE)
    return Batches(lambda seed: read_batches(read, parts, argument), len(parts))


def _alone(batch: Batch) -> Batches:
    return Batches(lambda seed: iter([batch]), 1)
