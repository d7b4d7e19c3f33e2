"""Forget one of five clouds of points, with a network and a dataset of your own: compare three methods epoch by epoch."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import expunge


class Clouds(Dataset):
    def __init__(self, size: int = 1000, seed: int = 0) -> None:
        centres = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(size) % 5
        self.points = centres[self.labels] + 0.8 * torch.randn(size, 10, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return {"points": self.points[index], "label": int(self.labels[index])}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(10, 64), nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points).relu()
        return self.out(hidden + self.second(hidden).relu())


def parts(data: Clouds) -> dict[str, Subset]:
    return {
        "forget": Subset(data, [row for row in range(len(data)) if data.labels[row] == 0]),
        "remain": Subset(data, [row for row in range(len(data)) if data.labels[row] != 0]),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    model, recipe = Network(), expunge.Tuning(expunge.Constant(0.05, epochs=5), batch_size=32)
    expunge.train(model, Clouds(), recipe)
    short = expunge.Tuning(expunge.replay(recipe.schedule, epochs=1), batch_size=32)
    # kind, remain_weight and ratio were chosen on Clouds(seed=1); the printed accuracies are on new points, Clouds(seed=2).
    fisher_mask = expunge.FisherMask(0.1, kind="expected", remain_weight=0.5, tuning=short)
    for method in (expunge.Finetune(short), expunge.RandomMask(0.1, tuning=short), fisher_mask):
        outcome = expunge.unlearn(model, **parts(Clouds()), method=method, watch=parts(Clouds(seed=2)))
        for record in outcome.history:
            shown = ", ".join(f"{name} {100 * accuracy:.1f} %" for name, accuracy in record.accuracies.items())
            moment = "before" if record.epoch is None else f"after epoch {record.epoch}"
            print(f"{type(method).__name__:10} {moment}: {shown}")
