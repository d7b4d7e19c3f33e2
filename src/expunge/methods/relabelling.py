"""Train on the forget data with random labels, together with the remain data."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.optim import Adam

from expunge.data.batches import Batches, Data, as_batches
from expunge.data.labels import IGNORED
from expunge.data.objective import Batch
from expunge.errors import InputError
from expunge.methods.context import Run, check_tuning, class_shape, needs_remain
from expunge.methods.streams import mixed, tagged
from expunge.training.carrying import Carried
from expunge.training.loop import Loss, Losses, Phase
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_flag, make_plain


@dataclass(frozen=True)
class RandomLabels:
    """Train on the forget data with random labels and on the remain data with their own, all in one stream.

    minimise (Σ_f ℓ(x_i, ỹ_i) + Σ_r ℓ(x_i, y_i)) / (n_f + n_r), ỹ_i uniform over the classes but y_i, drawn once; `exclude_own=False`: over
    all classes. It is the mean over the stream, not L_f + L_r: the forget data weigh n_f / (n_f + n_r). Every batch has the same share of
    forget samples. Graves et al. 2021, arXiv:2010.10981, who give no settings.

    Defaults: 3 epochs of Adam at 1e-4, the comparison in Foster et al. 2024 (arXiv:2308.07707).
    """

    exclude_own: bool = True
    tuning: Tuning = Tuning(Constant(1e-4, 3), optimizer=Adam)

    def __post_init__(self) -> None:
        check_flag("exclude_own", self.exclude_own)
        check_tuning(self.tuning, "RandomLabels")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "RandomLabels")
        phase = relabelled(model, forget, remain, self.exclude_own, self.tuning, run)
        run.train_phases(model, lambda epoch: [phase], self.tuning)


def relabelled(model: nn.Module, forget: Data, remain: Data, exclude_own: bool, tuning: Tuning, run: Run) -> Phase:
    """A pass over the remain data with the forget data among them, these with labels drawn once, by the tuning's seed."""
    drawn, own = _labelled(model, forget, remain, exclude_own, torch.Generator().manual_seed(tuning.seed), tuning, run)
    return Phase(mixed(drawn, own), "remain", _taught(run), itemgetter(0))


def relabelled_apart(
    model: nn.Module, forget: Data, remain: Data, exclude_own: bool, tuning: Tuning, run: Run
) -> tuple[list[Phase], Carried]:
    """A pass over the forget data, with labels drawn anew each time they are read, then one over the remain data; what draws the labels."""
    generator = torch.Generator().manual_seed(tuning.seed)
    drawn, own = _labelled(model, forget, remain, exclude_own, generator, tuning, run)
    phases = [Phase(drawn, "forget", _taught(run), itemgetter(0)), Phase(own, "remain", _taught(run), itemgetter(0))]
    return phases, Carried.generator(generator)


def _labelled(
    model: nn.Module, forget: Data, remain: Data, exclude_own: bool, generator: torch.Generator, tuning: Tuning, run: Run
) -> tuple[Batches, Batches]:
    """Both sets as (batch, labels to learn); the batches stay as they are, so the objective can read any form."""
    forget_batches, remain_batches = (as_batches(data, name, tuning.batch_size) for data, name in ((forget, "forget"), (remain, "remain")))
    shape = class_shape(model, forget, run, "random labels need")

    def draw(batch: Batch) -> Tensor:
        targets = run.objective.targets(batch)
        if targets.shape[1:] != shape[2:]:
            shapes = f"shape {tuple(targets.shape)} for logits {tuple(shape)}"
            raise InputError("forget", "random labels need one integer label for each row of logits", shapes)
        return random_labels(targets, shape[1], exclude_own, generator)

    return tagged(forget_batches, draw), tagged(remain_batches, run.objective.targets)


def _taught(run: Run) -> Loss:
    """The mean loss of a batch to the labels beside it."""

    def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
        samples, labels = batch
        return losses(run.objective.outputs(model, samples), labels).mean()

    return loss


def random_labels(targets: Tensor, classes: int, exclude_own: bool, generator: torch.Generator) -> Tensor:
    """A random label for every target, uniform over the other classes (or over all); ignored positions stay ignored."""
    if targets.dtype != torch.int64:
        raise InputError("forget", "random labels need integer labels (int64)", targets.dtype)
    if classes < 2:
        raise InputError("forget", "random labels need two classes or more", classes)
    strange = targets[((targets < 0) | (targets >= classes)) & (targets != IGNORED)]
    if len(strange):
        raise InputError("forget", f"random labels need labels in [0, {classes}), or {IGNORED} where none counts", int(strange[0]))
    drawn = torch.randint(1 if exclude_own else 0, classes, targets.shape, generator=generator).to(targets.device)
    return torch.where(targets == IGNORED, targets, (targets + drawn) % classes)
