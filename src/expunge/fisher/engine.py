"""Compute the exact diagonal of the Fisher information of any module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from expunge.data.batches import Data, as_batches, batch_size, device_of, take, to_device
from expunge.data.calling import out_of_memory
from expunge.data.classes import check_class_logits
from expunge.data.objective import Batch, Objective, check_objective
from expunge.errors import InputError, ModelError
from expunge.fisher import kinds
from expunge.fisher.batchwise import batch_squares
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.planning.passes import Pass, closed_forms
from expunge.fisher.planning.survey import Plan, survey
from expunge.fisher.samples import Squares, batched, looped
from expunge.fisher.sums import FisherSums
from expunge.model.checks import check_batch, check_model, check_module, check_names
from expunge.runtime.cuda_graphs import GraphedStep, Result
from expunge.runtime.modes import hooked, in_mode, seeded, unchanged
from expunge.runtime.nested import tensors
from expunge.runtime.progress import is_shown, track
from expunge.storage.tensors import weights_digest
from expunge.validate import check_choice, check_whole

Step = Callable[[tuple[Batch, Tensor]], Pass]  # takes a batch and its noise
KINDS = ("empirical", "expected", "sampled", "batch")
MAX_DRAWS = 10**6  # per sample: all are drawn at once


def diagonal(
    model: nn.Module,
    batches: Data,
    *,
    kind: str = "empirical",
    objective: Objective | None = None,
    parameters: Iterable[str] | None = None,
    draws: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    progress: bool | None = None,
) -> FisherSums:
    """Σ_n (∂ log p(y_n|x_n, w) / ∂w)² for every parameter, one gradient per sample, the model in eval mode.

    kind "empirical"  at the true labels (the paper's text, section "Masking with Fisher Information")
    kind "expected"   Σ_y p(y|x_n) (∂ log p(y|x_n))², exact over all labels, one forward pass shared
    kind "sampled"    an unbiased estimate of the expected one from `draws` backward passes, seeded, for many classes
    kind "batch"      Departure: the released program's rule. For each label the gradient of the batch-mean loss, squared, times the
                      batch-mean probability, one term per batch. It changes with the batch size and is not a sum over samples.

    Apart from rounding, the result does not depend on the batch size or on the order of the samples. `parameters`: the names of the
    parameters to include (default: all with requires_grad). `batch_size` cuts a dataset; a loader keeps its own batches. `progress`: None
    shows it where standard error is a terminal or a notebook runs. The model, its modes, flags, grads, hooks and the random state are
    left as they were.
    """
    check_choice("kind", kind, KINDS)
    check_whole("draws", draws, minimum=1, maximum=MAX_DRAWS)
    check_whole("seed", seed, minimum=0)
    objective = Objective() if objective is None else objective
    check_objective(objective)
    if kind != "empirical":  # the others do not ask the losses, but take the softmax of the logits for the model's distribution
        check_class_logits(objective, f'the kind "{kind}" (unlike "empirical") needs')
    wanted = _wanted(model, parameters)
    check_whole("batch_size", batch_size, minimum=1)
    data = as_batches(batches, batch_size=int(batch_size))
    digest = weights_digest(model)
    with undisturbed(model, wanted):
        if kind == "batch":
            adder: _Batchwise | _Samplewise = _Batchwise(model, wanted, objective)
        else:
            adder = _Samplewise(model, wanted, objective, kind, draws, seed)
        device = device_of(model)
        for batch in track(iter(data), f"Fisher ({kind})", total=data.known, enabled=is_shown(progress)):
            check_batch(batch, "batches", objective)
            adder.add(to_device(batch, device))
    return FisherSums(adder.totals(), adder.count, kind, digest)


class _Totals:
    """Float64 sums across batches: float32 ones would drift after some 10⁵ additions."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def commit(self, squares: Squares, count: int) -> None:
        for name, square in squares.items():
            if name in self.sums:
                self.sums[name].add_(square)
            else:
                # In the memory order the squares come in (a convolution's may be permuted), so that adding runs along memory.
                self.sums[name] = square.detach().to(torch.float64, memory_format=torch.preserve_format, copy=True)
        self.count += count

    def totals(self) -> dict[str, Tensor]:
        for name, total in self.sums.items():
            if not torch.isfinite(total).all():
                raise ModelError(
                    f"the squared gradients of {name} must be finite; found NaN or infinity: the loss is not finite, or they are beyond "
                    f"the range of {str(self.parameters[name].dtype).removeprefix('torch.')}"
                )
        none = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.parameters.items() if name not in self.sums}
        # Squares formed by pairs of positions can come out below zero by a rounding error.
        return {name: (none if name in none else self.sums)[name].clamp_min_(0).contiguous() for name in self.parameters}


class _Batchwise(_Totals):
    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        super().__init__(model, parameters, objective)
        step = partial(batch_squares, model, parameters, objective=objective)
        self.step = _graphed(step) if device_of(model).type == "cuda" and not hooked(model) else step

    def add(self, batch: Batch) -> None:
        self.commit(self.step(batch), 1)


class _Samplewise(_Totals):
    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective, kind: str, draws: int, seed: int
    ) -> None:
        super().__init__(model, parameters, objective)
        self.cotangents = {"empirical": kinds.empirical(objective), "expected": kinds.expected, "sampled": kinds.sampled}[kind]
        self.draws = draws if kind == "sampled" else 0
        self.generator = numpy.random.Generator(numpy.random.Philox(int(seed)))
        self.plan: Plan | None = None
        self.step: Step | None = None  # follows the plan; keeps memory from batch to batch
        self.logits: torch.Size | None = None  # of the last batch
        self.fitting: int | None = None  # how many samples fit into memory; known once more were tried

    def add(self, batch: Batch) -> None:
        noise = kinds.uniform_noise(self.generator, batch_size(batch), self.draws)
        self.add_part(batch, noise.to(tensors(batch)[0].device))

    def add_part(self, batch: Batch, noise: Tensor) -> None:
        """Add a batch, in halves where it does not fit into memory."""
        samples = batch_size(batch)
        if self.fitting is None or samples <= self.fitting:
            try:
                squares = self.squares(batch, noise)
            except RuntimeError as error:
                if samples == 1 or not out_of_memory(error):
                    raise
            else:
                return self.commit(squares, samples)
            # Outside the except block, which would keep the failed pass's tensors alive.
            self.step, self.fitting = None, samples - samples // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        for half in (slice(0, samples // 2), slice(samples // 2, None)):
            self.add_part(take(batch, half), noise[half])

    def squares(self, batch: Batch, noise: Tensor) -> Squares:
        if batch_size(batch) == 1:  # one sample is its own definition
            result = self.by(Plan())((batch, noise))
            return looped(self.model, list(self.parameters), batch, result.cotangents, self.objective)
        if self.plan is None:
            self.plan = survey(self.model, self.parameters, batch, self.objective)
        plan = self.plan
        if self.step is None:
            captured = tensors(batch)[0].is_cuda and not (plan.batched or plan.looped or hooked(self.model))
            self.step = _graphed(self.by(plan)) if captured else self.by(plan)
        if self.logits is not None:
            self.objective.check_batch(self.logits, batch)  # a CUDA graph cannot
        result = self.step((batch, noise))
        self.logits = result.logits
        if result.unexpected:
            plan.revise(result.unexpected)
            self.step = None
            return self.squares(batch, noise)
        squares = dict(result.squares)
        for way, names in ((batched, plan.batched), (looped, plan.looped)):
            if names:
                squares |= way(self.model, names, batch, result.cotangents, self.objective)
        return squares

    def by(self, plan: Plan) -> Step:
        """A pass by the closed forms of this plan. It has no reference to this object, so that there is no cycle and its memory is freed
        at once."""
        return partial(_pass, self.model, self.parameters, plan, self.cotangents, self.objective, Scratch())


def _pass(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    plan: Plan,
    cotangents: kinds.Cotangents,
    objective: Objective,
    scratch: Scratch,
    both: tuple[Batch, Tensor],
) -> Pass:
    batch, noise = both

    def sent(logits: Tensor) -> Sequence[Tensor]:
        if logits.shape[:1] != (batch_size(batch),):
            raise InputError("objective", f"logits must have one row per sample, {batch_size(batch)}", tuple(logits.shape))
        return cotangents(logits.detach(), objective.targets(batch), noise)

    return closed_forms(model, parameters, plan.layouts, plan.idle, batch, sent, objective, scratch)


def _graphed(step: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """The same step, as a CUDA graph from the second batch of a shape on: launching kernels from Python takes longer than running them."""
    return GraphedStep(step, warm=1, lasting=False)


@contextmanager
def undisturbed(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Put the model in eval mode, with gradients for these parameters alone. Afterwards everything is as it was, also after an error."""
    states = [(value, value.requires_grad, value.grad) for value in model.parameters()]
    chosen = {id(value) for value in parameters.values()}
    with torch.inference_mode(False), seeded(0, device_of(model)), in_mode(model, training=False), unchanged(model):
        try:
            for value, _, _ in states:
                value.grad = None
                value.requires_grad_(id(value) in chosen)
            yield
        finally:
            for value, flag, gradient in states:
                value.requires_grad_(flag)
                value.grad = gradient


def _wanted(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    check_module(model)
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    strange = [name for name, value in (named | buffers).items() if value.is_inference() or (name in named and value.is_complex())]
    if strange:
        raise ModelError(f"parameters must be real, and not made under torch.inference_mode; found {strange[0]}")
    check_model(model)
    if names is None:
        chosen = {name: value for name, value in named.items() if value.requires_grad}
    else:
        asked = check_names("parameters", names)
        if unknown := [name for name in asked if name not in named]:
            raise InputError("parameters", "must be names of the model's parameters", unknown[:4])
        chosen = {name: named[name] for name in asked}
    if not chosen:
        raise ModelError("the model has no parameters to take the Fisher information of (all frozen, or none at all)")
    return chosen
