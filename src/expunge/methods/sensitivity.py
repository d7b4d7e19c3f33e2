"""Lower how much the own logit of the forget samples answers to their inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from expunge.data.batches import Data, device_of, to_device
from expunge.data.inputs import Names, check_inputs, input_tensors, replaced
from expunge.data.objective import Batch
from expunge.errors import DivergedError, InputError, ModelError, UncheckedWarning
from expunge.methods.context import Run, check_tuning, class_shape
from expunge.methods.gradients import carrying, trainable
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import eager, in_mode
from expunge.training.carrying import Carried
from expunge.training.loop import Losses
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_number, make_plain

WHAT = "the input sensitivity of the other logits"
LEAST, MOST = 0.25, 3.0  # times what the sensitivity was: on the digits, networks beyond had lost the remain classes too
DOUBTED = (0.5, 2.0)  # beyond, some had


@dataclass(frozen=True)
class MuMis:
    """Lower the input sensitivity of the own logit of every forget sample, and raise that of another: no remain data.

    minimise mean_f (‖∂z_y/∂x‖² − ‖∂z_c/∂x‖²) / S, c uniform over the classes but y, drawn for every sample at every step. Stop after the
    first epoch in which the other logits' sensitivity s = √mean_f ‖∂z_c/∂x‖² is above its least value and above δ times its first one;
    at the latest when the schedule ends. `recovery` is δ, None: no early stop. Cheng et al. 2026, arXiv:2402.15109.

    `inputs` names the entries of a batch that x is, where there are several. Labels are integers, one per sample. The loss falls without
    end and takes the network with it: an s above 3 times its first value, or one that ends below a quarter of it, is a `DivergedError`, one
    that ends above twice or below half an `UncheckedWarning`.

    Departures: S = mean_f ‖∂z_y/∂x‖² before the first step, a constant that makes one rate suit inputs of any scale (1 in the
    text). s is measured once per epoch, with the same c each time. The authors' program could not be read: rate, epochs and δ are ours,
    gentle ones by trials on the digits.
    """

    recovery: float | None = 1.5
    tuning: Tuning = Tuning(Constant(1e-3, 40), batch_size=64, weight_decay=0.0, eval_mode=True)
    inputs: Names | None = None

    def __post_init__(self) -> None:
        if self.recovery is not None:
            check_number("recovery", self.recovery, 0, MOST, ends="()")
        check_tuning(self.tuning, "MuMis")
        object.__setattr__(self, "inputs", check_inputs(self.inputs))
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        classes = _classes(model, forget, run)
        generator = torch.Generator().manual_seed(self.tuning.seed)
        own, other = self._measured(model, forget, run, classes)
        if not own > 0 or not other > 0:
            raise ModelError("model: MuMis needs logits that depend on the inputs; on the forget data their gradient is zero")
        ratios = [1.0]  # of the other logits' sensitivity, after every epoch

        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            with twice_differentiable(model):
                target, irrelevant = self._squares(model, batch, run, classes, generator, graph=True)
                value = (target - irrelevant).mean() / own
                return carrying(value, parameters := trainable(model), torch.autograd.grad(value, parameters, allow_unused=True))

        def recovered() -> bool:
            ratios.append(math.sqrt(self._measured(model, forget, run, classes)[1] / other))
            check_ratio(ratios[-1], WHAT, self.tuning)
            return self.recovery is not None and ratios[-1] > max(self.recovery, min(ratios[:-1]))

        held = Carried.together(generator=Carried.generator(generator), ratios=Carried.listed(ratios))
        run.train(model, forget, self.tuning, loss, argument="forget", until=recovered, state=held)
        check_ratio(ratios[-1], WHAT, self.tuning, ended=True)

    def _measured(self, model: nn.Module, forget: Data, run: Run, classes: int) -> tuple[float, float]:
        """mean_f ‖∂z_y/∂x‖² and mean_f ‖∂z_c/∂x‖² in eval mode; every time with the same c."""
        generator, device = torch.Generator().manual_seed(self.tuning.seed), device_of(model)
        sums, samples = torch.zeros(2, dtype=torch.float64), 0
        with in_mode(model, training=False), torch.enable_grad(), twice_differentiable(model):
            for batch in run.batches(forget, "forget"):
                squares = self._squares(model, to_device(batch, device), run, classes, generator, graph=False)
                sums += torch.stack([part.detach().double().sum() for part in squares]).cpu()
                samples += len(squares[0])
        own, other = (sums / samples).tolist()
        return own, other

    def _squares(
        self, model: nn.Module, batch: Batch, run: Run, classes: int, generator: torch.Generator, graph: bool
    ) -> tuple[Tensor, Tensor]:
        """‖∂z_y/∂x‖² and ‖∂z_c/∂x‖² of every sample."""
        given = input_tensors(batch, run.objective, self.inputs, "MuMis needs")
        inputs = [tensor.detach().clone().requires_grad_() for tensor in given]
        labels = run.objective.targets(batch)
        drawn = (labels + torch.randint(1, classes, labels.shape, generator=generator).to(labels.device)) % classes
        logits = run.objective.logits(model, replaced(batch, given, inputs))
        return _square(logits, labels, inputs, graph, keep=True), _square(logits, drawn, inputs, graph, keep=graph)


def _square(logits: Tensor, labels: Tensor, inputs: list[Tensor], graph: bool, keep: bool) -> Tensor:
    """Σ over all inputs of ‖∂z_label/∂x‖². Samples do not depend on each other, so one gradient of a sum is that of every sample."""
    chosen = logits.gather(1, labels[:, None]).sum()
    if not chosen.requires_grad:
        raise ModelError("model: MuMis needs logits with a gradient by the inputs; they were detached, or rounded to integers")
    gradients = torch.autograd.grad(chosen, inputs, create_graph=graph, retain_graph=keep, allow_unused=True)
    if any(gradient is None for gradient in gradients):
        raise InputError("forget", "MuMis needs logits that depend on all of the inputs", "one without a gradient")
    return torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)


def _classes(model: nn.Module, forget: Data, run: Run) -> int:
    """The number of classes, of logits (N, K) with an integer label per sample."""
    shape = class_shape(model, forget, run, "MuMis needs")
    for batch in run.batches(forget, "forget"):
        targets: Any = run.objective.targets(batch)
        form = f"{targets.dtype} {tuple(targets.shape)} for logits {tuple(shape)}"
        if len(shape) != 2 or targets.dim() != 1 or targets.dtype != torch.int64:
            raise InputError("forget", "MuMis needs one integer label per sample (int64), and logits (N, K)", form)
        if strange := [label for label in targets.unique().tolist() if not 0 <= label < shape[1]]:
            raise InputError("forget", f"MuMis needs labels in [0, {shape[1]})", strange[0])
    return shape[1]


def check_ratio(ratio: float, what: str, tuning: Tuning, ended: bool = False) -> None:
    """Raise where a measure of how much outputs answer to inputs left its bounds: the network explodes, or is dead.

    Warn where training `ended` on the way there: without remain data nobody can tell what is left of the rest.
    """
    least = LEAST if ended else 0.0
    if not least <= ratio <= MOST:
        rate, epochs = float(tuning.schedule.rate(0)), tuning.schedule.epochs
        advice = f"give a lower rate, such as Tuning(Constant({rate / 3:.2g}, epochs={epochs}), ...)"
        raise DivergedError(f"{what} is {ratio:.3g} times what it was, outside [{least:g}, {MOST:g}]: the network is lost; {advice}")
    if ended and not DOUBTED[0] <= ratio <= DOUBTED[1]:
        advice = "look at accuracy on data of the classes that stay (watch=...), or do less: a lower rate, fewer epochs"
        warnings.warn(
            f"{what} is {ratio:.3g} times what it was, so the rest of the network may be lost; {advice}",
            UncheckedWarning,
            stacklevel=level_of_caller(),
        )


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run attention, recurrent layers and compiled models so that gradients of gradients exist; name what has none."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())  # cuDNN's have none
    try:
        with eager(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
            yield
    except NotImplementedError as error:
        raise ModelError(f"model: MuMis needs gradients of gradients, which one of its layers does not have; found: {error}") from error
