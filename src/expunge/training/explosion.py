"""Stop a training whose loss is no longer finite, or has exploded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from expunge.data.objective import Objective
from expunge.errors import DivergedError
from expunge.training.carrying import Carried
from expunge.training.tuning import Tuning
from expunge.validate import shown

FACTOR = 100  # a linear classifier of large inputs may go up to 60 times the loss of a guess, and end well
STEPS = 20  # judged at once, at least: fewer may well go up and come down again


class Explosion:
    """Judges the losses of the steps, an epoch at a time (several where they have fewer than 20 steps).

    Exploded: median of the steps > 100 · max(loss of the first step, loss of a uniform guess). A network that an edit broke begins with a
    high loss, so it is not stopped; nor is a short spike. Only losses of classes are judged: a method's own loss may rise on purpose, and
    for any other loss the value of a guess is unknown.
    """

    def __init__(self, tuning: Tuning, objective: Objective) -> None:
        self.tuning, self.objective = tuning, objective
        self.reference: Tensor | None = None
        self.recent: list[Tensor] = []
        self.epochs = 0

    def carried(self, device: torch.device) -> Carried:
        """What it remembers of the epochs before."""

        def get() -> dict[str, Any]:
            reference = None if self.reference is None else float(self.reference)
            return {"reference": reference, "epochs": self.epochs, "recent": [losses.tolist() for losses in self.recent]}

        def put(values: Any) -> None:
            reference = values["reference"]
            self.reference = None if reference is None else torch.tensor(reference, dtype=torch.float64, device=device)
            self.epochs, self.recent = int(values["epochs"]), [torch.tensor(losses, device=device) for losses in values["recent"]]

        return Carried(get, put, of_losses=False)

    def begin(self, loss: Tensor, logits: torch.Size) -> None:
        """Note the loss of the first step, on the device: reading it would make a GPU wait."""
        if self.reference is None and self.objective.of_classes:
            _, classes, *positions = logits
            self.reference = loss.detach().clamp(min=math.log(classes) * math.prod(positions))

    def check(self, losses: Tensor, epoch: int, sources: Sequence[Any] | None) -> None:
        """Raise `DivergedError` where the losses of an epoch (counted from 0) exploded; `sources` is None for a method's own loss."""
        if len(broken := torch.nonzero(~torch.isfinite(losses))):
            step = int(broken[0])
            if epoch == step == 0:
                raise DivergedError("the loss is not finite before the first step: look at the data, the outputs and the loss")
            place = f"epoch {epoch + 1}, iteration {step + 1} of {len(losses)}"
            raise DivergedError(f"the loss is no longer finite: {place}{self._advice(epoch + step / len(losses))}")
        if self.reference is None or sources is None:
            return
        self.epochs += 1
        if self.epochs == 1 and any(_in_order(source) for source in sources):
            self.reference = torch.maximum(self.reference, losses.max())  # the first batch may be of one class, which the network knows
        self.recent.append(losses)
        if sum(map(len, self.recent)) < STEPS:
            return
        median, reference = float(torch.cat(self.recent).cpu().median()), float(self.reference)
        self.recent.clear()
        if median > FACTOR * reference:
            began = f"its median is {median:.3g} in epoch {epoch + 1}, where the first step or a uniform guess had {reference:.3g}"
            raise DivergedError(f"the loss exploded: {began}{self._advice(epoch)}")

    def _advice(self, time: float) -> str:
        rate, epochs = float(self.tuning.schedule.rate(time)), self.tuning.schedule.epochs
        lower = f"give a lower rate, such as Tuning(Constant({rate / 10:.2g}, epochs={epochs}))"
        return f", at the learning rate {rate:.3g} of {shown(self.tuning.schedule)}; {lower}"


def _in_order(source: Any) -> bool:
    """Whether batches come in an order that may be that of their classes: datasets and lists are shuffled, a loader has its own way."""
    return isinstance(source, DataLoader) and isinstance(getattr(source, "sampler", None), SequentialSampler)
