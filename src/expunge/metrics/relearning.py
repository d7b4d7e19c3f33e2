"""Measure how soon a network re-learns what it forgot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from expunge.data.batches import Batches, Data, as_batches, read_batches, row_reader
from expunge.data.columns import as_dataset
from expunge.data.indices import resolved
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.metrics.predictions import accuracy_of, logits, mean_loss
from expunge.model.checks import check_module, check_names
from expunge.model.copying import copied
from expunge.training.loop import train
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_amount, check_whole, make_plain, shown

MAX_DRAWS = 10**9  # rows drawn at once, one integer each


def _check_tuning(tuning: Tuning) -> None:
    if not isinstance(tuning, Tuning):
        raise InputError("tuning", "must be a Tuning: re-learning trains", shown(tuning))


@dataclass(frozen=True)
class Relearning:
    """How re-learn time is counted: at most as many epochs as the schedule of `tuning` has, until the loss is `margin` above the goal.

    An epoch reads the data once or, with `draws`, that many samples drawn with replacement.

    Departures: the text gives no settings. Rate 0.1, momentum 0.9, decay 1e-4, batches of 128 and train mode are the released program's,
    the margin of 1e-5 is Golatkar's. The program's rate falls tenfold at epoch 80, ours does not; it prints one epoch more than it took.
    """

    tuning: Tuning = Tuning(Constant(0.1, 100))
    draws: int | None = None
    margin: float = 1e-5

    def __post_init__(self) -> None:
        _check_tuning(self.tuning)
        if self.draws is not None:
            check_whole("draws", self.draws, minimum=1, maximum=MAX_DRAWS)
        check_amount("margin", self.margin)
        make_plain(self)

    @classmethod
    def as_first_defined(cls) -> Relearning:
        """Golatkar et al., 2020: an "epoch" is 500 draws; rate 0.01 without momentum, in eval mode. Decay 0 and batches of 128 are ours."""
        return cls(Tuning(Constant(0.01, 100), momentum=0, weight_decay=0, eval_mode=True), draws=500)


@dataclass(frozen=True)
class Relearned:
    """`epochs` until `losses[epochs]` was no more than the `goal`; None: not within `limit` epochs."""

    epochs: int | None
    limit: int
    goal: float
    losses: tuple[float, ...]

    def __str__(self) -> str:
        return f"not within {self.limit}" if self.epochs is None else str(self.epochs)


def relearn_time(
    model: nn.Module,
    original: nn.Module,
    forget: Data,
    data: Data,
    relearning: Relearning = Relearning(),
    *,
    only: Sequence[str] | None = None,
    objective: Objective = Objective(),
    batch_size: int = 128,
    progress: bool | None = None,
) -> Relearned:
    """Epochs of training on all data until the loss on the forget data is the original's again (section More Readout Functions).

    min t : L(w_t; D_f) ≤ L(w*; D_f) + margin, w_0 the model, L the mean loss in eval mode. Compare it with the retrained network's
    time: if shorter, something is still in the weights; if longer, more is gone than should be. `only` names the parameters to train; the
    rest of the network, with its statistics, is fixed: the paper's MaskClassifier re-learns its classifier alone.

    A copy is trained: the model, its modes and all random states stay as they are.
    """
    if not isinstance(relearning, Relearning):
        raise InputError("relearning", "must be a Relearning, such as Relearning()", shown(relearning))
    check_module(model)
    check_module(original, "original")
    tuning = relearning.tuning
    learner = copied(model)
    if only is not None:
        _fix_others(learner, only)
        tuning = replace(tuning, eval_mode=True)
    goal = mean_loss(logits(original, forget, objective, batch_size), objective) + relearning.margin
    losses: list[float] = []

    def reached(epoch: int) -> bool:
        losses.append(mean_loss(logits(learner, forget, objective, batch_size), objective))
        return losses[-1] <= goal

    batches = as_batches(data, "data", tuning.batch_size) if relearning.draws is None else _draws(data, relearning.draws, tuning.batch_size)
    done = reached(0)
    if not done:
        train(learner, batches, tuning, objective, after_epoch=reached, progress=progress)
        done = losses[-1] <= goal
    return Relearned(len(losses) - 1 if done else None, tuning.schedule.epochs, goal, tuple(losses))


@dataclass(frozen=True)
class RelearnCurve:
    """Before any epoch and after each: the loss and the accuracy on the forget data, and the accuracy on unseen samples like them."""

    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    unseen: tuple[float, ...]


def relearn_curve(
    model: nn.Module,
    forget: Data,
    unseen: Data,
    data: Data,
    tuning: Tuning = Tuning(Constant(0.01, 5)),
    *,
    objective: Objective = Objective(),
    batch_size: int = 128,
    progress: bool | None = None,
) -> RelearnCurve:
    """Train a copy on all data, and see how fast the forget data come back; lay it beside the retrained network's curve.

    A loss that begins far above the retrained network's takes longer to come down whatever is known, so the accuracies tell more; those on
    `unseen` samples of the forgotten kind tell what was learnt from what was there before.
    """
    check_module(model)
    _check_tuning(tuning)
    learner = copied(model)
    losses: list[float] = []
    accuracies: list[float] = []
    others: list[float] = []

    def note(epoch: int) -> None:
        on_forget = logits(learner, forget, objective, batch_size)
        losses.append(mean_loss(on_forget, objective))
        accuracies.append(accuracy_of(on_forget))
        others.append(accuracy_of(logits(learner, unseen, objective, batch_size)))

    note(0)
    train(learner, as_batches(data, "data", tuning.batch_size), tuning, objective, after_epoch=note, progress=progress)
    return RelearnCurve(tuple(losses), tuple(accuracies), tuple(others))


def _fix_others(model: nn.Module, only: Sequence[str]) -> None:
    parameters = dict(model.named_parameters())
    names = check_names("only", only) if isinstance(only, str) or only else ()
    unknown = [name for name in names if name not in parameters]
    if unknown or not names:
        raise ModelError(f"only: must name parameters of the model; found {', '.join(unknown) or 'none'}")
    model.requires_grad_(False)
    for name in names:
        parameters[name].requires_grad_(True)


def _draws(data: Data, count: int, batch_size: int) -> Batches:
    """Every epoch another `count` samples, drawn with replacement."""
    data = as_dataset(data, "data")
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise InputError("data", "draws need a dataset", type(data).__name__)
    singles = as_batches(data, "data", 1)
    if isinstance(data, (list, tuple)) and next(iter(singles)) is data[0]:  # taken as a batch, not as a sample to make batches of
        raise InputError("data", "draws need a dataset of single samples", f"a {type(data).__name__} of batches")
    dataset = resolved(data, "data")
    size, read_rows = len(dataset), row_reader(dataset, "data")

    def read(seed: int | None) -> Iterator[Batch]:
        rows = torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed or 0))
        return read_batches(read_rows, rows.split(batch_size), "data")

    return Batches(read, -(-count // batch_size))
