"""Describe and read the results of cells, one JSON file per cell. Accuracies are fractions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from expunge.errors import InputError
from expunge.experiments.cells import Cell, check_cell
from expunge.storage.codec import Amount, Count, Share, Within, decode
from expunge.storage.documents import excerpt, read_json

NO_DATA = "no data"  # what an error begins with where the dataset is not there
DIVERGED = "diverged"  # and where the numbers left the finite ones
BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # what content that is not what it should be leads to

Step = Annotated[float, Within(0, 2)]


@dataclass(frozen=True)
class Accuracies:
    """`attack`, where samples were poisoned: the share of triggered test images given the attacker's label."""

    remain: Share
    forget: Share
    unlearn_score: Share
    attack: Share | None = None


@dataclass(frozen=True)
class Epoch:
    """After an epoch of fine-tuning; 0: after masking, before any. `seconds` of work so far."""

    epoch: Count
    remain: Share
    forget: Share
    unlearn_score: Share
    seconds: Amount
    attack: Share | None = None
    validation_remain: Share | None = None
    validation_forget: Share | None = None


@dataclass(frozen=True)
class Best:
    """The epoch with the best unlearn score on the data it was chosen `on`; the accuracies are those on the test set."""

    on: Literal["validation", "test"]
    epoch: Count
    remain: Share
    forget: Share
    unlearn_score: Share


@dataclass(frozen=True)
class Stability:
    """Fluctuation over the epochs."""

    remain: Step
    forget: Step
    unlearn_score: Step


@dataclass(frozen=True)
class Relearn:
    """Epochs until the forget loss is no more than the `goal`; None: not within `limit`. `losses`: after each epoch, None if infinite."""

    epochs: Count | None
    limit: Annotated[int, Within(1)]
    goal: float
    losses: Sequence[float | None]


@dataclass(frozen=True)
class Evidence:
    """What the network after the last epoch still knows. `loss_attack`: the area under the curve, forget against test samples.

    Where a class was forgotten: `probes`, how much of it a linear classifier finds at the end of each stage (recall on test data); and the
    re-learn curve, before any epoch and after each: loss (None: infinite) and accuracy on the forget samples, and accuracy on test samples
    of the class.
    """

    loss_attack: Share
    probes: Mapping[str, Share] = field(default_factory=dict)
    relearn_losses: Sequence[float | None] = ()
    relearn_accuracies: Sequence[Share] = ()
    relearn_unseen: Sequence[Share] = ()


@dataclass(frozen=True)
class Result:
    """A cell and what came out of it; where there is an `error` (a method that raises, or no data) there are no measures.

    "after" is the network at the best epoch, or where the cell asks for evidence at the last. `setting` is the method as it was built.
    `predicted` is where the forget samples go: the share given to each class. `agreement` and `divergence` are with the retrained network
    on all test data; `agreement_by` and `divergence_by` on "remain" and "forget" alone. `work_seconds` are those of the method, or of the
    retraining. What needs the retrained network is missing where it was not trained (`Store.retrained`).
    """

    cell: Cell
    digest: str
    seconds: Amount
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    experiments: tuple[str, ...] = ()
    error: str | None = None
    setting: str | None = None
    work_seconds: Amount | None = None
    weights: Mapping[str, str | None] = field(default_factory=dict)
    before: Accuracies | None = None
    retrained: Accuracies | None = None
    masked: Accuracies | None = None
    history: tuple[Epoch, ...] = ()
    best: Best | None = None
    last: Epoch | None = None
    stability: Stability | None = None
    relearn: Relearn | None = None
    evidence: Evidence | None = None
    agreement: Share | None = None
    divergence: float | None = None
    agreement_by: Mapping[str, Share] = field(default_factory=dict)
    divergence_by: Mapping[str, float | None] = field(default_factory=dict)
    attack: Share | None = None
    class_accuracies: Mapping[str, Sequence[Share | None]] = field(default_factory=dict)
    predicted: Mapping[str, Sequence[Share]] = field(default_factory=dict)
    masked_share: Mapping[str, Share] | None = None

    @property
    def final(self) -> bool:
        """Whether the runner need not do it again: data that were missing may be there next time."""
        return self.error is None or not self.error.startswith(NO_DATA)


def path_of(folder: str | os.PathLike[str], digest: str) -> Path:
    """Where a profile's folder keeps a cell's result."""
    return Path(folder) / "cells" / f"{digest}.json"


def read(path: str | os.PathLike[str]) -> Result:
    """Read the result in a file, which must be that of the cell the file is named by."""
    try:
        result = decode(Result, read_json(path), "result")
        check_cell(result.cell)
        _check_epochs(result)
    except BROKEN as error:
        rule = f"{os.fspath(path)} must hold the result of a cell ({excerpt(error)}); remove it, and a run makes it again"
        raise InputError("results", rule) from error
    if not Path(path).stem == result.digest == result.cell.digest:
        raise InputError("results", f"{os.fspath(path)} must hold the result of the cell it is named by", f"that of {result.cell.digest}")
    return result


def _check_epochs(result: Result) -> None:
    epochs = [step.epoch for step in result.history]
    if any(after <= before for before, after in zip(epochs[:-1], epochs[1:], strict=True)):
        raise ValueError(f"history must go from epoch to epoch; found {excerpt(epochs)}")
    if result.relearn is not None and result.relearn.epochs is not None and result.relearn.epochs > result.relearn.limit:
        raise ValueError(f"relearn must end within {result.relearn.limit} epochs; found {result.relearn.epochs}")


def load(folder: str | os.PathLike[str]) -> list[Result]:
    """All results of a profile's folder (the one that holds `cells/`), in the order of dataset, network, scenario, method and seed."""
    results = [read(path) for path in (Path(folder) / "cells").glob("*.json")]
    return sorted(results, key=lambda result: (result.cell.label, result.digest))
