"""Estimate how long cells and trainings will take, from those of the same kind that have run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.experiments.cells import Cell
from expunge.experiments.networks import Spec
from expunge.experiments.results import BROKEN, load
from expunge.experiments.runner import Place
from expunge.storage.documents import excerpt, read_json


@dataclass(frozen=True)
class Estimates:
    """Mean seconds by kind; where nothing of a kind has run, those of the model; None where nothing of it has."""

    cells: dict[Any, float]
    networks: dict[Any, float]

    @classmethod
    def of(cls, place: Place) -> Estimates:
        results = [result for result in load(place.folder) if result.error is None and result.hardware.get("device") == place.device.type]
        by_kind = [(result.cell.kind, result.seconds) for result in results] + [(result.cell.model, result.seconds) for result in results]
        notes = [_note(path, place.device.type) for path in sorted(place.models.glob("*.spec.json"))]
        return cls(_means(by_kind), _means(note for note in notes if note is not None))

    def cell(self, cell: Cell) -> float | None:
        return self.cells.get(cell.kind, self.cells.get(cell.model))

    def network(self, spec: Spec) -> float | None:
        return self.networks.get(_training({"dataset": spec.dataset, "network": spec.network, "recipe": spec.recipe}))


def _note(path: Path, device: str) -> tuple[Any, float] | None:
    """What a network's file says was trained, and its seconds, where that was on such a device."""
    try:
        note = read_json(path)
        trained = _training(note["spec"])
        return (trained, float(note["seconds"])) if "seconds" in note and note["device"] == device else None
    except BROKEN as error:
        raise InputError("models", f"{path} must record how a network was trained ({excerpt(error)})") from error


def _training(spec: dict[str, Any]) -> tuple[Any, ...]:
    return (str(spec["dataset"]), str(spec["network"]), int(spec["recipe"]["epochs"]))


def _means(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    by_kind: dict[Any, list[float]] = {}
    for kind, seconds in pairs:
        by_kind.setdefault(kind, []).append(seconds)
    return {kind: statistics.fmean(values) for kind, values in by_kind.items()}
