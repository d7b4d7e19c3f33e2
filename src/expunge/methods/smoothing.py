"""Lower how much the outputs change under noise around the forget samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, device_of, to_device
from expunge.data.inputs import Names, check_inputs, input_tensors, replaced
from expunge.data.objective import Batch
from expunge.errors import ModelError
from expunge.methods.context import Run, check_tuning
from expunge.methods.gradients import carrying, trainable
from expunge.methods.sensitivity import check_ratio
from expunge.runtime.modes import in_mode
from expunge.training.carrying import Carried
from expunge.training.loop import Losses
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_flag, check_positive, check_whole, make_plain


@dataclass(frozen=True)
class JiT:
    """Smooth the network around the forget samples, by one pass over them: no remain data, no labels.

    minimise Σ_f (1/N)·Σ_i ‖z(x) − z(x + ξ_i)‖ / ‖ξ_i‖, ξ_i from N(0, σ²), the sum over a batch at every step. `noise` is σ, in the units of
    the inputs, `copies` N. Foster et al. 2024, arXiv:2402.01401, algorithm 1.

    `inputs` names the entries of a batch that x is, where there are several. Nothing protects the rest of the network: the smoothest
    one is constant. A quotient on the forget data above 3 times its first value, or one that ends below a quarter, is a `DivergedError`,
    one that ends above twice or below half an `UncheckedWarning`.

    Defaults: η = 3e-4, σ = 0.5, N = 25, batches of 128: those of their program for a class of CIFAR-100 (VGG11).
    Departures: their program takes no gradient through z(x + ξ), clips x + ξ to the range of the batch, adds up the gradients of
    all batches so far, and leaves the network in train mode: `as_released()`.
    """

    noise: float = 0.5
    copies: int = 25
    both_sides: bool = True
    clip: bool = False
    tuning: Tuning = Tuning(Constant(3e-4, 1), momentum=0.0, weight_decay=0.0, eval_mode=True)
    inputs: Names | None = None

    def __post_init__(self) -> None:
        check_positive("noise", self.noise)
        check_whole("copies", self.copies, minimum=1)
        check_flag("both_sides", self.both_sides)
        check_flag("clip", self.clip)
        check_tuning(self.tuning, "JiT")
        object.__setattr__(self, "inputs", check_inputs(self.inputs))
        make_plain(self)

    @classmethod
    def as_released(
        cls, noise: float = 0.5, copies: int = 25, tuning: Tuning = Tuning(Constant(3e-4, 1), momentum=1.0, weight_decay=0.0)
    ) -> JiT:
        """The authors' program: only z(x) is moved, noisy inputs are clipped to the range of their batch, dropout is on.

        The program never clears the gradients between batches, which is a momentum of 1. It reads the data in their order; here they are
        shuffled.
        """
        return cls(noise, copies, both_sides=False, clip=True, tuning=tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        generator = torch.Generator().manual_seed(self.tuning.seed)
        before = self._measured(model, forget, run)
        if not before > 0:
            raise ModelError("model: JiT needs outputs that depend on the inputs; noise on the forget data changes nothing")

        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            return self._descent(model, batch, run, generator)

        def check(ended: bool = False) -> bool:
            check_ratio(self._measured(model, forget, run) / before, "what noise on the forget data changes", self.tuning, ended)
            return False

        run.train(model, forget, self.tuning, loss, argument="forget", until=check, state=Carried.generator(generator))
        check(ended=True)

    def _descent(self, model: nn.Module, batch: Batch, run: Run, generator: torch.Generator) -> Tensor:
        """The loss of a batch with its gradient, taken copy by copy: the graphs of all copies at once would not fit in memory."""
        inputs, parameters = input_tensors(batch, run.objective, self.inputs, "JiT needs"), trainable(model)
        clean = _wide(run.objective.logits(model, batch))
        end = clean.detach().requires_grad_()
        total, sums = torch.zeros((), dtype=end.dtype, device=end.device), [torch.zeros_like(part) for part in (end, *parameters)]
        for _ in range(self.copies):
            noisy, size = self._noisy(batch, inputs, generator)
            with torch.set_grad_enabled(self.both_sides):
                outputs = _wide(run.objective.logits(model, noisy))
            value = _quotients(end, outputs, size).sum() / self.copies
            total += value.detach()
            for part, gradient in zip(sums, torch.autograd.grad(value, (end, *parameters), allow_unused=True), strict=True):
                if gradient is not None:
                    part += gradient
        if clean.requires_grad:
            rest = torch.autograd.grad(clean, parameters, sums[0], allow_unused=True)
            sums[1:] = [part if gradient is None else part + gradient for part, gradient in zip(sums[1:], rest, strict=True)]
        return carrying(total, parameters, sums[1:])

    def _noisy(self, batch: Batch, inputs: list[Tensor], generator: torch.Generator) -> tuple[Batch, Tensor]:
        """The batch with noise on its inputs, and the norm of the noise of every sample."""
        noisy = []
        for tensor in inputs:
            drawn = torch.randn(tensor.shape, generator=generator).to(tensor)
            changed = tensor.detach() + self.noise * drawn
            noisy.append(changed.clamp(tensor.min(), tensor.max()) if self.clip else changed)
        parts = [(new - tensor.detach()).flatten(1) for new, tensor in zip(noisy, inputs, strict=True)]
        return replaced(batch, inputs, noisy), _wide(torch.cat(parts, 1)).norm(dim=1)

    def _measured(self, model: nn.Module, forget: Data, run: Run) -> float:
        """The mean quotient of the forget data with one copy, in eval mode; every time with the same noise."""
        generator, device = torch.Generator().manual_seed(self.tuning.seed), device_of(model)
        sums, samples = 0.0, 0
        with in_mode(model, training=False), torch.no_grad():
            for batch in run.batches(forget, "forget"):
                moved = to_device(batch, device)
                inputs = input_tensors(moved, run.objective, self.inputs, "JiT needs")
                noisy, size = self._noisy(moved, inputs, generator)
                clean, changed = (_wide(run.objective.logits(model, part)) for part in (moved, noisy))
                sums, samples = sums + float(_quotients(clean, changed, size).sum()), samples + len(size)
        return sums / samples if math.isfinite(sums) else math.inf


def _quotients(clean: Tensor, noisy: Tensor, size: Tensor) -> Tensor:
    """‖z(x) − z(x + ξ)‖ / ‖ξ‖ of every sample; 0 where clipping took all of the noise."""
    return (clean - noisy).flatten(1).norm(dim=1) / torch.where(size > 0, size, math.inf)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
