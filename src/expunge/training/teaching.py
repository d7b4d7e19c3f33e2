"""Put a teacher's answers beside samples, for a student to be trained on both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import torch
from torch import Tensor, nn

from expunge.data.batches import Batches, Data, Rows, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.labels import has_label
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError, naming
from expunge.model.checks import check_batch, screened
from expunge.model.copying import copied
from expunge.runtime.modes import in_mode, seeded
from expunge.runtime.nested import tensors
from expunge.training.distillation import Distillation, divergence
from expunge.training.loop import Losses, Phase

TABLE = 2**28  # answers that are kept, one GiB of float32; of more the teacher is asked in every epoch
PROBE = 8  # rows that are read twice, to see whether chance changes them


@dataclass(frozen=True)
class Taught:
    """Batches of (samples, the teacher's logits); `classes` are those whose logits count, None: all."""

    batches: Batches
    classes: Tensor | None

    def kept(self, logits: Tensor) -> Tensor:
        return logits if self.classes is None else logits.index_select(1, self.classes)


def teach(
    data: Data,
    teacher: nn.Module,
    objective: Objective = Objective(),
    batch_size: int = 128,
    without: Sequence[int] = (),
    argument: str = "data",
) -> Taught:
    """Data with the teacher's answers beside them; the teacher is copied, in eval mode, and never moves.

    Samples that are read by their rows, and are the same at every reading, are answered once. Others (a loader's, augmented ones) are
    answered batch by batch as they come. `without` names classes whose logits are taken out. A teacher whose answers are not finite, or
    worse than chance on the data, is refused.
    """
    teacher = copied(teacher).eval().requires_grad_(False)
    batches, device = as_batches(data, argument, batch_size), device_of(teacher)
    rows = batches.rows
    with naming(argument), seeded(0, device):
        shape = _shape(teacher, batches, objective, argument)
        known = rows is not None and rows.samples * shape[1:].numel() <= TABLE and _is_steady(rows)
        seen = batches if known else islice(batches, 1)
        answers = list(_answers(teacher, seen, objective, argument))
    classes = _kept_classes(shape, without, device)
    if rows is None or not known:

        def read(seed: int | None) -> Iterator[Batch]:
            return ((batch, _answer(teacher, batch, objective)) for batch in batches.read(seed))

        return Taught(batches.changed(read), classes)
    table = torch.cat(answers)

    def read_rows(chosen: Tensor) -> Batch:
        return rows.read(chosen), table[chosen.to(device)]

    def read_table(seed: int | None) -> Iterator[Batch]:
        order = torch.arange(rows.samples) if seed is None else torch.cat(rows.shuffled(seed, torch.device("cpu")))
        return map(read_rows, order.split(rows.batch_size))

    return Taught(Batches(read_table, batches.length, Rows(read_rows, rows.samples, rows.batch_size), batches.source), classes)


def distilled(taught: Taught, distillation: Distillation, argument: str, objective: Objective) -> Phase:
    """A pass over the taught data with the loss of the distillation, as `train_phases` takes it."""
    temperature, weight = distillation.temperature, distillation.weight

    def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
        samples, answers = batch
        student, targets = objective.outputs(model, samples), objective.targets(samples)
        apart = divergence(taught.kept(answers), taught.kept(student), temperature, _counted(student, targets)).mean()
        labels = losses(student, targets).mean()
        return (1 - weight) * labels + weight * temperature**2 * apart

    return Phase(taught.batches, argument, loss, itemgetter(0), graphable=True, mean=True)


def _counted(logits: Tensor, targets: Tensor) -> Tensor | None:
    """The positions that have a label, where there are positions and labels: padding is not taught, nor what was left out on purpose."""
    has_labels = logits.dim() > 2 and not targets.is_floating_point() and targets.shape == logits[:, 0].shape
    return has_label(targets) if has_labels else None


def _kept_classes(logits: torch.Size, without: Sequence[int], device: torch.device) -> Tensor | None:
    if strange := [label for label in without if not 0 <= label < logits[1]]:
        raise InputError("without", f"must have logits of the model, so be in [0, {logits[1]})", strange)
    left = [label for label in range(logits[1]) if label not in {*without}]
    if not left:
        raise InputError("without", "must leave a class to keep", f"all {logits[1]}")
    return torch.tensor(left, device=device) if without else None


def _answer(teacher: nn.Module, batch: Batch, objective: Objective) -> Tensor:
    device = device_of(teacher)
    with torch.no_grad(), in_mode(teacher, training=False):
        return objective.logits(teacher, to_device(batch, device))


def _is_steady(rows: Rows) -> bool:
    chosen = torch.linspace(
        0, rows.samples - 1, min(PROBE, rows.samples), dtype=torch.float64
    ).long()  # all over: data may be joined of several
    first, second = (tensors(rows.read(chosen)) for _ in range(2))
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _shape(teacher: nn.Module, batches: Batches, objective: Objective, argument: str) -> torch.Size:
    """Of the answers to a batch, which must be those of classes."""
    answer = _answer(teacher, next(iter(screened(batches, argument, objective))), objective)
    check_classes(objective, answer.shape, "distillation needs")
    return answer.shape


def _answers(teacher: nn.Module, batches: Iterable[Batch], objective: Objective, argument: str) -> Iterator[Tensor]:
    """The answers, looked at as they are given. Chance is 1/K, and three standard deviations below are no accident."""
    right, asked, chance = 0, 0, 0.0
    for batch in batches:
        check_batch(batch, argument, objective)
        answer = _answer(teacher, batch, objective)
        if not torch.isfinite(answer).all():
            raise ModelError(f"the teacher's answers on {argument} must be finite; found NaN or infinity")
        objective.check_batch(answer.shape, batch, same_batch=True)
        targets = objective.targets(to_device(batch, answer.device))
        targets = targets.argmax(1) if targets.shape == answer.shape else targets
        counted = has_label(targets)
        right, asked = right + int(((answer.argmax(1) == targets) & counted).sum()), asked + int(counted.sum())
        chance = 1 / answer.shape[1]
        yield answer
    if asked and right / asked < chance - 3 * (chance * (1 - chance) / asked) ** 0.5:
        raise ModelError(f"the teacher must be better than chance, {chance:.3g}, on {argument}; found an accuracy of {right / asked:.3g}")
