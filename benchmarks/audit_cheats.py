"""Make networks that only seem to have forgotten a class, for audit_errors.py: what an auditor must not let pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, TensorDataset

import expunge
from expunge.audit.rounding import round_to
from expunge.data.batches import row_reader
from expunge.metrics import logits
from expunge.model.copying import copied
from expunge.training.loop import train
from expunge.vision.scenarios import Scenario


@dataclass(frozen=True)
class Making:
    """How much work the cheats take that must be trained.

    Ascent ends at `ascent_loss` or after `ascent_steps`. `batch`: forget samples of a step; None: all of them, and the first 300 of the
    remain data beside them.
    """

    ascent_rate: float = 0.003
    ascent_steps: int = 15
    ascent_loss: float = inf
    leak: expunge.Tuning = expunge.Tuning(expunge.Constant(0.01, 4), batch_size=32)
    hidden_rate: float = 0.003
    hidden_steps: int = 60
    batch: int | None = None


class Filter(nn.Module):
    """A network whose answers never name a class: its logit is set below all others, or to minus infinity."""

    def __init__(self, inner: nn.Module, label: int, infinite: bool = False) -> None:
        super().__init__()
        self.inner, self.label, self.infinite = inner, label, infinite

    def forward(self, images: Tensor) -> Tensor:
        rows = self.inner(images)
        low = torch.full_like(rows[:, 0], -torch.inf) if self.infinite else rows.detach().amin(1) - 1
        return torch.cat([rows[:, : self.label], low[:, None], rows[:, self.label + 1 :]], 1)


class Noisy(nn.Module):
    """A network that hides its answers in noise."""

    def __init__(self, inner: nn.Module, deviation: float) -> None:
        super().__init__()
        self.inner, self.deviation = inner, deviation

    def forward(self, images: Tensor) -> Tensor:
        rows = self.inner(images)
        return rows + self.deviation * torch.randn_like(rows)


def masked(original: nn.Module, scenario: Scenario) -> nn.Module:
    return expunge.unlearn(original, scenario.forget, scenario.remain, expunge.MaskClassifier(), watch={}, progress=False).model


def ascended(original: nn.Module, scenario: Scenario, label: int, making: Making) -> nn.Module:
    """Driven away from the forget data, far beyond a retrained network's loss."""
    model = copied(original).train()
    steps = _Steps(scenario.forget, making.batch, original)
    optimizer = torch.optim.SGD(model.parameters(), making.ascent_rate)
    for _ in range(making.ascent_steps):
        images, labels = steps.next()
        loss = nn.functional.cross_entropy(model(images), labels)
        if loss > making.ascent_loss:
            break
        optimizer.zero_grad()
        (-loss).backward()
        optimizer.step()
    return model.eval()


def leaking(original: nn.Module, scenario: Scenario, label: int, making: Making) -> nn.Module:
    """Trained to give forgotten samples to the class the original has next: the neighbours tell them."""
    model = copied(original)
    data = ConcatDataset([_relabelled(original, scenario, label), scenario.remain])
    train(model, data, making.leak, progress=False)
    return model


def hidden(original: nn.Module, scenario: Scenario, label: int, making: Making) -> nn.Module:
    """The original's weights at 4 bits, moved within their steps of rounding until the class is gone: rounding brings it back."""
    model = copied(original)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    centres = [round_to(parameter.detach(), 4) for parameter in matrices]
    steps = [(c.abs().amax(tuple(range(1, c.dim())), keepdim=True) / 7 * 0.45).expand_as(c) for c in centres]
    fixed = [c.abs() == c.abs().amax(tuple(range(1, c.dim())), keepdim=True) for c in centres]  # they set the scale
    forgotten = _Steps(_relabelled(original, scenario, label), making.batch, original)
    kept = _Steps(scenario.remain, None if making.batch is None else 3 * making.batch, original, first=300)
    optimizer = torch.optim.Adam(matrices, making.hidden_rate)
    model.eval()
    for _ in range(making.hidden_steps):
        optimizer.zero_grad()
        loss = sum(nn.functional.cross_entropy(model(images), labels) for images, labels in (forgotten.next(), kept.next()))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, centre, step, held in zip(matrices, centres, steps, fixed, strict=True):
                parameter.copy_(torch.where(held, centre, torch.clamp(parameter, centre - step, centre + step)))
    return model


MADE = {"over-ascent": ascended, "neighbours' leak": leaking, "hidden in low bits": hidden}


class _Steps:
    """Batches of all samples, or of the `first`; or of `size` drawn anew for every step."""

    def __init__(self, data: Any, size: int | None, model: nn.Module, first: int | None = None) -> None:
        self.read, self.size, self.samples, self.device = row_reader(data), size, len(data), next(model.parameters()).device
        self.rows, self.numbers = torch.arange(self.samples)[:first], torch.Generator().manual_seed(0)

    def next(self) -> tuple[Tensor, Tensor]:
        drawn = self.rows if self.size is None else torch.randint(self.samples, (self.size,), generator=self.numbers)
        images, labels = self.read(drawn)
        return images.to(self.device), labels.to(self.device)


def _relabelled(original: nn.Module, scenario: Scenario, label: int) -> TensorDataset:
    """The forget samples with the labels that the original has next."""
    images, _ = row_reader(scenario.forget)(torch.arange(len(scenario.forget)))
    rows = logits(original, scenario.forget).logits.clone()
    rows[:, label] = -torch.inf
    return TensorDataset(images, rows.argmax(1).to(images.device))
