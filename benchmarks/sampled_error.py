"""One backward pass for the expected Fisher information: which random cotangent has the smallest error?

Three unbiased estimators, each at the cost of one forward and one backward pass, against the exact sum over all labels, on a fresh and on a
trained network (handwritten digits, float64): with p = softmax(logits),

    plain       a label k drawn from p;                      p − e_k
    importance  a label k drawn from q_k ∝ p_k‖e_k − p‖²;     √(p_k/q_k) (p − e_k)
    signs       v of random signs;                           √p∘v − p(√p·v)

    PYTHONPATH=src python benchmarks/sampled_error.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from expunge import fisher
from expunge.data.objective import Objective
from expunge.training.loop import train
from expunge.training.schedules import Steps, replay
from expunge.training.tuning import Tuning
from expunge.vision.datasets.digits import CLASSES, digits

SEEDS = 10
Estimator = Callable[[Tensor, Tensor], Tensor]  # (probabilities, uniform numbers of the same shape) -> what to send back from the logits


def drawn_labels(chances: Tensor, noise: Tensor) -> Tensor:
    edges = chances.cumsum(1)
    return (edges < noise[:, :1] * edges[:, -1:]).sum(1, keepdim=True).clamp(max=chances.shape[1] - 1)


def plain(p: Tensor, noise: Tensor) -> Tensor:
    return p.scatter_add(1, drawn_labels(p, noise), -torch.ones_like(p))


def importance(p: Tensor, noise: Tensor) -> Tensor:
    weights = (p * (1 - 2 * p + p.square().sum(1, keepdim=True))).clamp(min=0)
    q = weights / weights.sum(1, keepdim=True)
    label = drawn_labels(q, noise)
    return (p / q).gather(1, label).sqrt() * p.scatter_add(1, label, -torch.ones_like(p))


def signs(p: Tensor, noise: Tensor) -> Tensor:
    v = torch.where(noise < 0.5, -1.0, 1.0).to(p)
    return p.sqrt() * v - p * (p.sqrt() * v).sum(1, keepdim=True)


ESTIMATORS: dict[str, Estimator] = {"plain": plain, "importance": importance, "signs": signs}


def estimate(model: nn.Module, data: Iterable[tuple[Tensor, Tensor]], estimator: Estimator, seed: int) -> dict[str, Tensor]:
    """The engine's sums of squares with the estimator's cotangents: a loss whose slope at the logits is the cotangent.

    The random numbers come as the targets: those of a sample are its own, whatever batch it is in.
    """
    generator = torch.Generator().manual_seed(seed)
    noisy = [(x, torch.rand(len(x), CLASSES, generator=generator, dtype=torch.float64)) for x, _ in data]

    def losses(logits: Tensor, noise: Tensor) -> Tensor:
        return (logits * estimator(logits.detach().softmax(1), noise)).sum(1)

    return fisher.diagonal(model, noisy, objective=Objective(losses=losses, classes=False)).sums


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor], names: Iterable[str] | None = None) -> float:
    """‖found − exact‖ / ‖exact‖ over these parameters together."""
    chosen = list(exact if names is None else names)
    difference = torch.cat([(found[name] - exact[name]).flatten() for name in chosen])
    return float(difference.norm() / torch.cat([exact[name].flatten() for name in chosen]).norm())


def networks(**epochs: int) -> dict[str, tuple[nn.Module, float]]:
    """Name -> a network trained for so many epochs, and its mean largest probability on the training images."""
    images, labels = digits(0).train.tensors
    data = TensorDataset(images.double(), labels)
    found = {}
    for name, length in epochs.items():
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)).double()
        if length:
            train(model, data, Tuning(replay(Steps(), length), batch_size=32, weight_decay=0))
        found[name] = model, float(model(images.double()).detach().softmax(1).amax(1).mean())
    return found


def main() -> None:
    torch.set_num_threads(1)
    images, labels = digits(0).train.tensors
    batches = [(images.double(), labels)]
    print(f"relative error of one draw, {len(labels)} samples, median of {SEEDS} seeds (largest)")
    print(f"{'training':12} {'mean max p':>10} {'parameters':>10}" + "".join(f" {name:>15}" for name in ESTIMATORS))
    for name, (model, certainty) in networks(**{"none": 0, "5 epochs": 5, "100 epochs": 100}).items():
        exact = fisher.diagonal(model, batches, kind="expected").sums
        found = {key: [estimate(model, batches, estimator, seed) for seed in range(SEEDS)] for key, estimator in ESTIMATORS.items()}
        for part, chosen in {"all": list(exact), "head": ["3.weight", "3.bias"], "rest": ["1.weight", "1.bias"]}.items():
            cells = []
            for sums in found.values():
                errors = [relative_error(each, exact, chosen) for each in sums]
                cells.append(f"{statistics.median(errors):.3f} ({max(errors):.3f})")
            print(f"{name:12} {certainty:>10.4f} {part:>10}" + "".join(f" {cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
