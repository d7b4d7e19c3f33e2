"""What a cell's run found, one JSON file a cell, and reading them back. Accuracies are fractions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from expunge.errors import InputError
from expunge.experiments.cells import Cell
from expunge.experiments.shapes import Amount, Count, Share, Within, check
from expunge.storage.documents import excerpt, read_json

NO_DATA = "no data"  # what an error begins with where the dataset is not there
DIVERGED = "diverged"  # and where the numbers left the finite ones
BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # what content that is not what it should be leads to
SHARES = ("ratio", "fraction", "remain_fraction")  # settings of methods and scenarios

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
    """Epochs until the forget loss is no more than the `goal`; None: not within `limit`. `losses` are those after each epoch."""

    epochs: Count | None
    limit: Annotated[int, Within(1)]
    goal: float
    losses: Sequence[float]


@dataclass(frozen=True)
class Result:
    """A cell and what came out of it; where there is an `error` (a method that says no, or no data) all measures may be None.

    "after" is the network at the best epoch. `predicted` is where the forget samples go: the share given to each class. `agreement` and
    `divergence` are with the retrained network on all test data; `agreement_by` and `divergence_by` on "remain" and "forget" alone.
    """

    cell: Cell
    digest: str
    experiments: tuple[str, ...]
    seconds: Amount
    work_seconds: Amount | None
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    weights: Mapping[str, str | None]
    before: Accuracies | None
    retrained: Accuracies | None
    masked: Accuracies | None
    history: tuple[Epoch, ...]
    best: Best | None
    last: Epoch | None
    stability: Stability | None
    relearn: Relearn | None
    agreement: Share | None
    divergence: float | None
    agreement_by: Mapping[str, Share]
    divergence_by: Mapping[str, float | None]
    attack: Share | None
    class_accuracies: Mapping[str, Sequence[Share | None]]
    predicted: Mapping[str, Sequence[Share]]
    masked_share: Mapping[str, Share] | None
    error: str | None

    @property
    def final(self) -> bool:
        """Whether the runner need not do it again: data that were missing may be there next time."""
        return self.error is None or not self.error.startswith(NO_DATA)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Result:
        def part(name: str, kind: Any) -> Any:
            return None if content.get(name) is None else kind(**content[name])

        def listed(name: str) -> Sequence[Any]:
            found = content.get(name, [])
            check(found, Sequence[Any], name)  # text has parts as well
            return found

        return cls(
            cell=Cell.from_json(content["cell"]),
            digest=content["digest"],
            experiments=tuple(listed("experiments")),
            seconds=content["seconds"],
            work_seconds=content.get("work_seconds"),
            versions=content["versions"],
            hardware=content["hardware"],
            weights=content.get("weights") or {},
            before=part("before", Accuracies),
            retrained=part("retrained", Accuracies),
            masked=part("masked", Accuracies),
            history=tuple(Epoch(**step) for step in listed("history")),
            best=part("best", Best),
            last=part("last", Epoch),
            stability=part("stability", Stability),
            relearn=part("relearn", Relearn),
            agreement=content.get("agreement"),
            divergence=content.get("divergence"),
            agreement_by=content.get("agreement_by") or {},
            divergence_by=content.get("divergence_by") or {},
            attack=content.get("attack"),
            class_accuracies=content.get("class_accuracies") or {},
            predicted=content.get("predicted") or {},
            masked_share=content.get("masked_share"),
            error=content.get("error"),
        )


def path_of(folder: str | os.PathLike[str], digest: str) -> Path:
    """Where a profile's folder keeps a cell's result."""
    return Path(folder) / "cells" / f"{digest}.json"


def read(path: str | os.PathLike[str]) -> Result:
    """The result in a file, which must be what it says and that of the cell the file is named by."""
    try:
        found = Result.from_json(read_json(path))
        check(found, Result, "result")
        check_cell(found.cell)
        _check_epochs(found)
    except BROKEN as error:
        raise InputError("results", f"{os.fspath(path)} must hold the result of a cell ({excerpt(error)})") from error
    if not Path(path).stem == found.digest == found.cell.digest:
        raise InputError("results", f"{os.fspath(path)} must hold the result of the cell it is named by", f"that of {found.cell.digest}")
    return found


def check_cell(cell: Cell) -> None:
    """Of a cell that was read from a file; one of BROKEN where it is none."""
    check(cell, Cell, "cell")
    check(cell.validation, Share, "validation")
    cell.as_json(), cell.label, hash(cell.kind)  # which need more of the cell's parts than that they are mappings
    check(cell.recipe["epochs"], Count, "epochs")
    for name, value in [*cell.scenario.items(), *cell.method.items()]:
        if name in SHARES:
            check(value, Share | None, name)
    check((cell.relearn or {}).get("margin", 0.0), Amount, "margin")


def _check_epochs(result: Result) -> None:
    epochs = [step.epoch for step in result.history]
    if any(after <= before for before, after in zip(epochs[:-1], epochs[1:], strict=True)):
        raise ValueError(f"history must go from epoch to epoch; found {excerpt(epochs)}")
    if result.relearn is not None and result.relearn.epochs is not None and result.relearn.epochs > result.relearn.limit:
        raise ValueError(f"relearn must end within {result.relearn.limit} epochs; found {result.relearn.epochs}")


def load(folder: str | os.PathLike[str]) -> list[Result]:
    """All results of a profile's folder (the one that holds `cells/`), in the order of dataset, network, scenario, method and seed."""
    found = [read(path) for path in (Path(folder) / "cells").glob("*.json")]
    return sorted(found, key=lambda result: (result.cell.label, result.digest))
