"""Distil from teachers: a random network on the forget data, or the original network, disobeyed there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.optim import Adam

from expunge.data.batches import Batches, Data, as_batches, batch_size, device_of
from expunge.data.objective import Batch
from expunge.methods.context import Run, check_tuning, class_shape, needs_remain
from expunge.methods.streams import mixed, tagged
from expunge.methods.training import built
from expunge.model.copying import copied
from expunge.model.renewal import reset
from expunge.runtime.modes import seeded
from expunge.training.distillation import divergence
from expunge.training.loop import Losses, Phase
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_amount, check_builder, check_positive, check_whole, make_plain


@dataclass(frozen=True)
class BadTeacher:
    """Learn the forget data from a random network and the remain data from the original one.

    minimise mean_i KL(t_i ‖ s_i) with t_i the bad teacher's probabilities where i is to be forgotten, else the original's; both in eval
    mode. `fresh` builds the random network; without it every module's own `reset_parameters` is called. Chundawat et al. 2023,
    arXiv:2205.08096.

    Defaults: temperature 1, one epoch of Adam at 1e-4, batch 256, as in their program.
    Departures: they train on 30 % of the remain data; here on all that is passed. Their program divides the loss by the number of classes.
    """

    temperature: float = 1.0
    tuning: Tuning = Tuning(Constant(1e-4, 1), batch_size=256, optimizer=Adam)
    fresh: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        check_tuning(self.tuning, "BadTeacher")
        check_builder("fresh", self.fresh, "must be a function that builds the network with new weights, or None")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "BadTeacher")
        class_shape(model, forget, run, "BadTeacher needs")
        good, bad = _teacher(model), _teacher(self._random(model))

        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            samples, forgotten = batch
            student = run.objective.outputs(model, samples)
            with torch.no_grad():
                taught, untaught = run.objective.outputs(good, samples), run.objective.outputs(bad, samples)
                teacher = torch.where(forgotten.reshape(-1, *(1,) * (taught.dim() - 1)), untaught, taught)
            return divergence(teacher, student, self.temperature).mean()

        def marked(data: Data, argument: str, mark: bool) -> Batches:
            batches = as_batches(data, argument, self.tuning.batch_size)
            return tagged(batches, lambda batch: torch.full((batch_size(batch),), mark))

        phase = Phase(mixed(marked(forget, "forget", True), marked(remain, "remain", False)), "remain", loss, itemgetter(0))
        run.train_phases(model, lambda epoch: [phase], self.tuning)

    def _random(self, model: nn.Module) -> nn.Module:
        with seeded(self.tuning.seed, device_of(model)):
            if self.fresh is not None:
                return built(self.fresh).to(next(model.parameters()))
            random = copied(model)
            reset(random)
            return random


@dataclass(frozen=True)
class SCRUB:
    """Disobey the original network on the forget data, obey it on the remain data.

    max-steps, an epoch of them in each of the first `max_epochs` epochs:  maximise mean_f KL(t ‖ s)
    min-steps, an epoch of them in every epoch, after the max-steps:       minimise α·mean_r KL(t ‖ s) + γ·L_r

    t and s are the probabilities of the original (in eval mode) and the student at `temperature` T, KL is times T². α is `obey_weight`,
    γ `task_weight`. Kurmanji et al. 2023, arXiv:2302.09880, algorithm 1.

    Defaults: α = 0.001, γ = 0.99, T = 4, 3 epochs at 5e-4 of which 2 with max-steps, forget batches of 512, remain batches of 128, as in
    their program for a class of CIFAR-10.
    """

    obey_weight: float = 0.001
    task_weight: float = 0.99
    temperature: float = 4.0
    max_epochs: int = 2
    forget_batch_size: int = 512
    tuning: Tuning = Tuning(Constant(5e-4, 3), weight_decay=5e-4)

    def __post_init__(self) -> None:
        check_amount("obey_weight", self.obey_weight)
        check_amount("task_weight", self.task_weight)
        _check_temperature(self.temperature)
        check_whole("max_epochs", self.max_epochs, minimum=0)
        check_whole("forget_batch_size", self.forget_batch_size, minimum=1)
        check_tuning(self.tuning, "SCRUB")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "SCRUB")
        class_shape(model, forget, run, "SCRUB needs")
        teacher = _teacher(model)

        def apart(student: Tensor, batch: Batch) -> Tensor:
            with torch.no_grad():
                taught = run.objective.outputs(teacher, batch)
            return self.temperature**2 * divergence(taught, student, self.temperature).mean()

        def disobey(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            return -apart(run.objective.outputs(model, batch), batch)

        def obey(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            student = run.objective.outputs(model, batch)
            return self.obey_weight * apart(student, batch) + self.task_weight * losses(student, run.objective.targets(batch)).mean()

        max_phase = Phase(as_batches(forget, "forget", self.forget_batch_size), "forget", disobey)
        min_phase = Phase(as_batches(remain, "remain", self.tuning.batch_size), "remain", obey)
        run.train_phases(model, lambda epoch: [max_phase, min_phase] if epoch < self.max_epochs else [min_phase], self.tuning)


def _teacher(model: nn.Module) -> nn.Module:
    return copied(model).eval().requires_grad_(False)


def _check_temperature(temperature: float) -> None:
    check_positive("temperature", temperature)
