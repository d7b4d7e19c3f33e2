"""A profile of seconds: one epoch of training on the digits."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.profiles import SMOKE
from expunge.experiments.runner import Place, Task

TINY = replace(
    SMOKE,
    seeds=(1,),
    training={"epochs": 2, "batch_size": 128},
    tuning_epochs=2,
    relearn={"rate": 0.01, "limit": 2},
    ratios=(0.0, 0.1),
)
FEW = ("finetune", "random-mask", "fisher-mask")


def place(folder: Path) -> Place:
    return Place(folder / "tiny", folder / "models", None, torch.device("cpu"))


def tasks(experiment: str, methods=FEW, profile=TINY) -> list[Task]:
    found = {entry.cell.digest: entry.cell for entry in entries(EXPERIMENTS[experiment], profile, listed=methods)}
    return [Task(cell, (experiment,)) for cell in found.values()]


def write_cells(path: Path, asked: list[Task]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([task.as_json() for task in asked]))
    return path
