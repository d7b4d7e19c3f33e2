"""Distil from the original network, with answers to the forget data that are the more uncertain the better it still knows them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax
from torch.optim import Adam

from expunge.data.batches import Batches, Data, as_batches, batch_size, device_of, to_device
from expunge.data.labels import has_label
from expunge.data.objective import Batch
from expunge.errors import NoEffectWarning
from expunge.methods.context import Run, check_tuning, class_shape, needs_remain
from expunge.methods.streams import mixed, tagged
from expunge.model.copying import copied
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import in_mode, seeded
from expunge.training.carrying import Carried
from expunge.training.loop import Losses, Phase
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_number, make_plain

MARGIN = 0.01  # below the target, at which it stops
LARGEST_GAIN = 100  # exp(100) in float32 is finite, and far beyond any use


@dataclass(frozen=True)
class LoTUS:
    """Logits tempering: learn the original's answers, smoothed on the forget data until these are known no better than unseen data.

    minimise mean_i Σ_k −t_ik·log s_ik over forget and remain data in one stream, s the student's probabilities, t drawn from the original's
    logits z: t = gumbel_softmax(z, τ) for forget samples, for remain samples its limit τ → 0, one class drawn from softmax(z).
    τ = exp(α·(A_f − A_u)) before every epoch, A_f the student's accuracy on the forget data, A_u the original's on unseen data. It stops,
    at the latest with `tuning`, once A_f ≤ max(A_u − 0.01, 0). `gain` is α. Spartalis et al. 2025, arXiv:2503.18314.

    `unseen_accuracy` is A_u, measured by you on held-out data: `expunge.metrics.accuracy(model, validation)`. None: what can be known
    without such data. Where no label of the forget data remains, a network that never saw the class answers 0 of it right: A_u = 0. Else
    A_u is the original's accuracy on the remain data. It was trained on them, as on any part of them that might be kept apart, so
    this is an upper bound: too little is forgotten rather than too much, of samples that were learnt by heart nearly nothing. Give
    the number; for wrong labels and poison, which no other network should answer as asked, give 0.

    Defaults: α = 2, 10 epochs of Adam at 1e-4, batches of 128: ResNet18 in their program, which has α = 8 for CIFAR-10 and 32 for a class.
    Departures: they train on 30 % of the remain data; here on all that is passed. Their Adam has decoupled decay of 5e-4, of no effect at
    that rate. Their program rounds accuracies to 0.01. It goes on where A_f = A_u = 0, at τ = 1, and so teaches a forgotten class again.
    """

    gain: float = 2.0
    unseen_accuracy: float | None = None
    tuning: Tuning = Tuning(Constant(1e-4, 10), optimizer=Adam)

    def __post_init__(self) -> None:
        check_number("gain", self.gain, 0, LARGEST_GAIN, ends="[]")
        if self.unseen_accuracy is not None:
            check_number("unseen_accuracy", self.unseen_accuracy, 0, 1, ends="[]", rule="must be a fraction in [0, 1], or None")
        check_tuning(self.tuning, "LoTUS")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "LoTUS")
        class_shape(model, forget, run, "LoTUS needs")
        teacher, target = copied(model).eval().requires_grad_(False), self._target(model, forget, remain, run)
        heat = _Heat(self.gain)

        def measure() -> float:
            accuracy, _ = _answered(model, forget, "forget", run)
            heat.gap = accuracy - target
            return accuracy

        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            samples, forgotten = batch
            with torch.no_grad():
                goal = drawn(run.objective.outputs(teacher, samples), forgotten, heat.temperature)
            answers = run.objective.outputs(model, samples).to(goal.dtype).log_softmax(1)
            return -(goal * answers).flatten(1).sum(1).mean()

        def marked(data: Data, argument: str, mark: bool) -> Batches:
            batches = as_batches(data, argument, self.tuning.batch_size)
            return tagged(batches, lambda batch: torch.full((batch_size(batch),), mark))

        if (accuracy := measure()) <= target - MARGIN:
            found = f"the accuracy on the forget data is {accuracy:.3g} already, and it stops below {target:.3g}"
            warnings.warn(
                f"LoTUS changed nothing: {found}; if that is wrong, give unseen_accuracy", NoEffectWarning, stacklevel=level_of_caller()
            )
            return run.begin()
        phase = Phase(mixed(marked(forget, "forget", True), marked(remain, "remain", False)), "remain", loss, itemgetter(0))
        run.train_phases(
            model, lambda epoch: [phase], self.tuning, until=lambda: measure() <= max(target - MARGIN, 0), state=heat.carried()
        )

    def _target(self, model: nn.Module, forget: Data, remain: Data, run: Run) -> float:
        if self.unseen_accuracy is not None:
            return self.unseen_accuracy
        accuracy, labels = _answered(model, remain, "remain", run)
        return accuracy if labels & _answered(model, forget, "forget", run)[1] else 0.0


@dataclass
class _Heat:
    """The temperature of the answers, by the last gap between the accuracies."""

    gain: float
    gap: float = 0.0

    def carried(self) -> Carried:
        def put(gap: float) -> None:
            self.gap = gap

        return Carried(lambda: self.gap, put)

    @property
    def temperature(self) -> float:
        return math.exp(self.gain * self.gap)


def drawn(logits: Tensor, forgotten: Tensor, temperature: float) -> Tensor:
    """Gumbel-softmax of the logits over dimension 1: at this temperature where the sample is to be forgotten, else one class."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    soft, hard = gumbel_softmax(logits, temperature, dim=1), gumbel_softmax(logits, hard=True, dim=1)
    return torch.where(forgotten.reshape(-1, *(1,) * (logits.dim() - 1)), soft, hard)


def _answered(model: nn.Module, data: Data, argument: str, run: Run) -> tuple[float, set[int]]:
    """The share of labels that are the largest logit, in eval mode, and all labels; of probabilities the most likely is the label."""
    device, right, asked = device_of(model), 0, 0
    labels: set[int] = set()
    with seeded(0, device), in_mode(model, training=False), torch.no_grad():
        for batch in run.batches(data, argument):
            batch = to_device(batch, device)
            logits, targets = run.objective.logits(model, batch), run.objective.targets(batch)
            targets = targets.argmax(1) if targets.shape == logits.shape else targets
            counted = has_label(targets)
            right, asked = right + int(((logits.argmax(1) == targets) & counted).sum()), asked + int(counted.sum())
            labels |= {*targets[counted].unique().tolist()}
    return right / max(asked, 1), labels
