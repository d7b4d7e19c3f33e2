"""A task of seconds for the tests of requests: clouds of points, a small network, a file of its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import expunge
from expunge.requests.prepared import Request
from expunge.requests.settings import Settings

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import expunge

def points(samples, seed):
    centres = 2 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(samples) % 4
    return TensorDataset(centres[labels] + torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed)), labels)

def model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

def train():
    return points(120, 1)

def test():
    return points(40, 2)

def validation():
    return points(40, 3)

def recipe():
    return expunge.Tuning(expunge.Constant(0.05, epochs=2), batch_size=32)

def bright(sample):
    return float(sample[0].sum()) > 8
"""
MASK = Settings("fisher-mask", ("ratio=0.1", "tuning=None"), threads=1)


def write_task(folder: Path, text: str = TASK, name: str = "mytask.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def write_weights(folder: Path, text: str = TASK) -> Path:
    """The weights of a short training."""
    names: dict[str, object] = {}
    exec(text, names)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model: nn.Module = names["model"]()  # type: ignore[operator]
        expunge.train(model, names["train"](), expunge.Tuning(expunge.Constant(0.05, epochs=3), batch_size=32), progress=False)  # type: ignore[operator]
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def request(folder: Path, forget: str = "0-9", out: str = "out", settings: Settings = MASK, **others: object) -> Request:
    """A request in a folder that has the task and the weights."""
    for make, name in ((write_task, "mytask.py"), (write_weights, "model.safetensors")):
        if not (folder / name).exists():
            make(folder)
    return Request(folder / "mytask.py", folder / "model.safetensors", forget, folder / out, settings=settings, **others)  # type: ignore[arg-type]
