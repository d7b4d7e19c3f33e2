"""Networks of a second or less that were trained on clouds of points, and cheats made of them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import expunge

CLASSES, WIDTH, FORGOTTEN = 4, 12, 2


@cache
def clouds(samples: int = 400, seed: int = 0) -> TensorDataset:
    numbers = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(samples) % CLASSES
    return TensorDataset(centres[labels] + torch.randn(samples, WIDTH, generator=numbers), labels)


def parts() -> tuple[Subset, Subset, TensorDataset]:
    """Forget, remain and test."""
    data = clouds()
    chosen = data.tensors[1] == FORGOTTEN
    return *(Subset(data, torch.where(rows)[0].tolist()) for rows in (chosen, ~chosen)), clouds(240, seed=1)


def fresh(seed: int) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, CLASSES))


@cache
def trained(seed: int, without: bool = False) -> nn.Module:
    model = fresh(seed)
    expunge.train(model, parts()[1] if without else clouds(), expunge.Tuning(expunge.Constant(0.05, 12), batch_size=32, seed=seed))
    return model.eval()


class Filter(nn.Module):
    def __init__(self, inner: nn.Module, low: float = -1e3) -> None:
        super().__init__()
        self.inner, self.low = inner, low

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x).clone()
        rows[:, FORGOTTEN] = self.low
        return rows
