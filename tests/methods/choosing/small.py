"""Clouds of points in four classes, networks that were trained on them, and parts of them to forget."""

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import expunge
from expunge import metrics
from expunge.data.objective import Objective

CLASSES, WIDTH = 4, 12


def clouds(samples: int, seed: int, apart: float = 1.0) -> TensorDataset:
    """Four clouds that overlap."""
    means = apart * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(samples) % CLASSES
    return TensorDataset(means[labels] + torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed)), labels)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def trained(data: Dataset, model: nn.Module | None = None, epochs: int = 10) -> nn.Module:
    model = network() if model is None else model
    expunge.train(model, data, expunge.Tuning(expunge.Constant(0.05, epochs), batch_size=32))
    return model


DATA, UNSEEN, TEST = clouds(640, seed=2), clouds(240, seed=3), clouds(400, seed=4)


CLASS = [Subset(DATA, torch.nonzero(rows).flatten().tolist()) for rows in (DATA.tensors[1] == 0, DATA.tensors[1] != 0)]


SAMPLES = Subset(DATA, range(60)), Subset(DATA, range(60, 640))


def noisy(seed: int = 2, samples: int = 640) -> TensorDataset:
    return clouds(samples, seed, apart=0.35)


def accuracy(model: nn.Module, data: Dataset) -> float:
    return metrics.accuracy(model, data)


def parted(rows: torch.Tensor) -> tuple[Subset, Subset]:
    return Subset(DATA, rows.nonzero().flatten().tolist()), Subset(DATA, (~rows).nonzero().flatten().tolist())


class Numbered(Dataset):
    """Samples whose first input is their number, divided by a million."""

    def __init__(self, data: TensorDataset) -> None:
        self.inputs, self.labels = data.tensors[0].clone(), data.tensors[1]
        self.inputs[:, 0] = torch.arange(len(data)) / 1e6

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row):
        return self.inputs[row], self.labels[row]


def watched_training(counts: list[torch.Tensor]) -> Objective:
    """Notes the numbers of samples that a network in train mode is shown."""

    def outputs(model, batch):
        if model.training and torch.is_grad_enabled():
            counts.append((batch[0][:, 0] * 1e6).round().long())
        return model(batch[0])

    return Objective(outputs=outputs)


class Bare(nn.Module):
    """Parameters that nothing knows how to make anew."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(0.3 * torch.randn(WIDTH, 64, generator=generator))
        self.last = nn.Parameter(0.1 * torch.randn(64, CLASSES, generator=generator))

    def forward(self, x):
        return (x @ self.first).relu() @ self.last


class HalfBare(nn.Module):
    """A bare matrix before a layer that can be reset."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(0.3 * torch.randn(WIDTH, 64, generator=torch.Generator().manual_seed(0)))
        self.rest = network()[2:]

    def forward(self, x):
        return self.rest((x @ self.first).relu())


class Attentive(nn.Module):
    """Attention and LayerNorm over three words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.place = nn.Linear(WIDTH // 3, 16), nn.Parameter(torch.zeros(3, 16))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x):
        hidden = self.words(x.unflatten(1, (3, -1))) + self.place
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden).mean(1))


class Adapted(nn.Module):
    """A frozen layer and a small one beside it, as adapters have it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            base.requires_grad_(False),
            nn.Linear(base.in_features, rank, False),
            nn.Linear(rank, base.out_features, False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def built(name: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        if name == "transformer":
            return Attentive()
        if name == "BatchNorm":
            return nn.Sequential(
                nn.Linear(WIDTH, 32),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Linear(32, 32),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Linear(32, CLASSES),
            )
        plain = network()
        return nn.Sequential(Adapted(plain[0]), nn.ReLU(), Adapted(plain[2]), nn.ReLU(), nn.Linear(64, CLASSES))
