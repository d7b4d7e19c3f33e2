"""What two states of a store of Fisher sums give away of the samples that were taken out between them: a membership attack.

Run `PYTHONPATH=src python benchmarks/store_leak.py`. Whoever has both states, the weights and a candidate x knows D = F(forgotten), the
difference, and g² = (∂ log p(y|x) / ∂w)². If x is among the forgotten, D_j ≥ g_j² for every weight j: the score is min_j D_j / g_j² over
the weights where g_j² is not negligible. Candidates: the forgotten, as many that stayed, as many that were never trained on. Printed: the
area under the curve against the others, and how many of the forgotten are found before the first that was not.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import expunge
from expunge.vision.datasets.digits import digits

NEGLIGIBLE = 1e-6  # of the candidate's largest


def squares(model: nn.Module, data: torch.utils.data.Dataset, rows: list[int]) -> Tensor:
    """(candidates, weights): the squared gradient of every sample."""
    parts = []
    for row in rows:
        sums = expunge.fisher.diagonal(model, torch.utils.data.Subset(data, [row]), progress=False).sums
        parts.append(torch.cat([total.flatten() for total in sums.values()]))
    return torch.stack(parts)


def scores(difference: Tensor, candidates: Tensor) -> Tensor:
    telling = candidates > NEGLIGIBLE * candidates.amax(1, keepdim=True)
    return torch.where(telling, difference / candidates, torch.inf).amin(1)


def area(positive: Tensor, negative: Tensor) -> float:
    """P(positive > negative) + ½ P(equal)."""
    return float(((positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 3, 10, 30, 100, 300])
    parser.add_argument("--candidates", type=int, default=100, help="that stayed, and that were never trained on")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = digits()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))
    expunge.train(model, data.train, expunge.Tuning(expunge.Constant(0.05, epochs=8), batch_size=32), progress=False)
    order = torch.randperm(len(data.train)).tolist()
    others = torch.cat(
        [squares(model, data.train, order[-options.candidates :]), squares(model, data.test, list(range(options.candidates)))]
    )
    print(f"{len(data.train)} training samples, {sum(p.numel() for p in model.parameters()):,} weights")
    print(f"{'forgotten':>9} {'AUC, stayed':>12} {'AUC, unseen':>12} {'found first':>12}")
    for size in options.sizes:
        forgotten = squares(model, data.train, order[:size])
        difference = forgotten.sum(0) * (1 + 1e-6)  # rounding of the two stores
        own, stayed, unseen = scores(difference, forgotten), *scores(difference, others).split(options.candidates)
        first = int((own > torch.cat([stayed, unseen]).max()).sum())
        print(f"{size:>9} {area(own, stayed):>12.3f} {area(own, unseen):>12.3f} {first:>6} of {size}")


if __name__ == "__main__":
    main()
