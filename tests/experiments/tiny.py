"""A profile of seconds: two epochs of training on the digits; and digits so few that a comparison takes no time."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from expunge.experiments import comparison, construction
from expunge.experiments.plans import EXPERIMENTS, entries
from expunge.experiments.profiles import SMOKE
from expunge.experiments.runner import Place, Task
from expunge.experiments.worker import Work
from expunge.storage.codec import encode
from expunge.vision.datasets import digits
from expunge.vision.networks import NETWORKS

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


def write_work(path: Path, asked: list[Task], here: Place, **settings) -> Path:
    work = Work(tuple(asked), str(here.folder), str(here.models), data=here.data, device="cpu", **settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(encode(work)))
    return path


def few_digits(patch) -> None:
    """A sixth of the digits, of every class alike, a narrow network, and re-learning that is soon given up."""
    images, labels = digits.raw()
    patch.setattr(digits, "raw", lambda: (images[::6], labels[::6]))
    patch.setitem(NETWORKS, "resnet8", partial(NETWORKS["resnet8"], width=4))
    patch.setattr(comparison, "RELEARN", {"rate": 0.05, "limit": 1})
    construction.parts.cache_clear()
