"""Compute Fisher sums of a model that is sharded by FSDP2: the squares are reduced into the shard they belong to."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as distributed
from torch import Tensor, nn

from expunge.data.batches import Data, device_of, take, to_device
from expunge.data.batches import batch_size as size_of
from expunge.data.chunks import Chunks, cut
from expunge.data.digest import add_batch
from expunge.data.objective import Batch, Objective, check_objective
from expunge.errors import ModelError, naming
from expunge.fisher import kinds
from expunge.fisher.naming import listed, objective_name
from expunge.fisher.samples import fresh
from expunge.fisher.sums import FisherSums
from expunge.model.checks import check_batch, check_module
from expunge.model.copying import unwrapped
from expunge.runtime import processes
from expunge.runtime.modes import in_mode, safe_norms, seeded, unchanged
from expunge.runtime.sharded_files import load_sharded, save_sharded
from expunge.storage.sharded import check_rows, is_sharded, like, local, reshard
from expunge.storage.tensors import weights_digest
from expunge.validate import check_choice, check_positive, check_whole

KINDS = ("empirical", "expected", "sampled")
KIND = "sharded-fisher-sums"
COMM = "_reduce_scatter_comm"
SETTINGS = {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True}
ALIKE = "parameters and buffers (training leaves BatchNorm's statistics different: broadcast those of rank 0)"
HOOKS = "_post_accumulate_grad_hooks"


def sharded_diagonal(
    model: nn.Module,
    data: Data,
    *,
    kind: str = "empirical",
    objective: Objective | None = None,
    draws: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    patience: float = processes.PATIENCE,
) -> FisherSums:
    """`fisher.diagonal` of a model sharded by `fully_shard`, for all parameters with requires_grad; sums are sharded as the parameters are.

    All processes call it with the same data. Each takes every W-th sample of a batch, alone, so that every sample counts once and no sample
    touches another. Where FSDP2 would reduce gradients g_r of W processes into shards, Σ_r g_r² is reduced instead: no process ever holds
    more of the sums than its shards. One sample per process and pass: on a model that fits into one device `by_chunks` is faster.
    """
    model = unwrapped(model)
    check_positive("patience", patience)
    objective = Objective() if objective is None else objective
    parameters: dict[str, Any] = {}
    chunks: list[Chunks] = []
    named = ""

    def describe() -> dict[str, str]:
        nonlocal named
        check_module(model)
        check_choice("kind", kind, KINDS)
        kinds.check_draws(kind, draws)
        check_whole("seed", seed, minimum=0)
        check_objective(objective)
        kinds.check_distribution(kind, objective)
        parameters.update(_parameters(model))
        _groups(model)
        processes.check_takes(device_of(model), "a sharded model")
        named = objective_name(objective, kind)
        chunks.append(cut(data, batch_size))
        names = listed(parameters)
        settings = {"kind": kind, "objective": named, "draws": str(draws), "seed": str(seed)}
        return {**chunks[0].described(), "parameters": names, "device": device_of(model).type, **settings}

    processes.agree(describe, patience)
    with torch.inference_mode(False):
        sums = {name: torch.zeros_like(local(parameter), dtype=torch.float64) for name, parameter in parameters.items()}
    cotangents = kinds.of_kind(kind, objective)
    generator = numpy.random.Generator(numpy.random.Philox(int(seed)))
    device, count = device_of(model), 0
    with _squaring(model, parameters) as square, naming("data"), processes.collective(parameters.values(), patience):
        digest = weights_digest(model)
        processes.agree(lambda: {ALIKE: digest}, patience)
        for number, batch in enumerate(_agreed(chunks[0], objective, patience)):
            if not number:
                logits = _logits(model, objective, to_device(batch, device))
            objective.check_batch(logits, batch)  # all processes check all samples, so that all of them stop
            noise = kinds.uniform_noise(generator, size_of(batch), int(draws) if kind == "sampled" else 0)
            _add(model, parameters, to_device(batch, device), noise.to(device), objective, cotangents, sums, square)
            count += size_of(batch)
    for name, total in sums.items():
        if not bool(torch.isfinite(total).all()):
            raise ModelError(f"the squared gradients of {name} must be finite; found NaN or infinity: the loss is not finite")
    return FisherSums({name: like(parameters[name], total) for name, total in sums.items()}, count, kind, digest, named)


def _agreed(chunks: Chunks, objective: Objective, patience: float) -> Iterator[Batch]:
    """The batches, each once all processes have read the same: with different ones they would wait for each other without an end."""
    batches = (batch for number in range(len(chunks)) for batch in chunks.read(number))
    for number in itertools.count():
        read: list[Batch] = []

        def describe(number: int = number, read: list[Batch] = read) -> dict[str, str]:
            read += itertools.islice(batches, 1)
            digest = hashlib.sha256()
            for batch in read:
                check_batch(batch, "data", objective)
                add_batch(digest, batch)
            return {f"batch {number} of the data": digest.hexdigest() if read else "none"}

        processes.agree(describe, patience)
        if not read:
            return
        yield read[0]


def _logits(model: nn.Module, objective: Objective, batch: Batch) -> torch.Size:
    """The shape of the logits of a batch, by its first sample."""
    with torch.no_grad():
        logits = objective.logits(model, take(batch, slice(0, 1))).shape
    return torch.Size((size_of(batch), *logits[1:]))


def save_sums(sums: FisherSums, folder: str | os.PathLike[str]) -> Path:
    """Keep sharded sums in a new folder, each process its shards (a distributed checkpoint of torch's)."""
    description = {"kind": KIND, "count": str(sums.count), "fisher": sums.kind, "digest": sums.digest, "objective": sums.objective}
    return save_sharded(folder, sums.sums, description)


def load_sums(folder: str | os.PathLike[str], model: nn.Module) -> FisherSums:
    """Read sums into shards as the model has them; they may have been written by another number of processes."""

    def empty(_: Mapping[str, str]) -> dict[str, Any]:
        return {name: like(value, torch.zeros_like(local(value), dtype=torch.float64)) for name, value in _parameters(model).items()}

    sums, told = load_sharded(folder, empty, KIND)
    return FisherSums(sums, int(told["count"]), told["fisher"], told["digest"], told["objective"])


def _parameters(model: nn.Module) -> dict[str, Any]:
    reshard(model)
    parameters: dict[str, Any] = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise ModelError("the model has no parameters to take the Fisher information of (all frozen, or none at all)")
    for name, value in parameters.items():
        if not is_sharded(value):
            raise ModelError(f"{name} must be sharded by fully_shard, as all parameters must; else use fisher.by_chunks")
        check_rows(name, value)
        if value.dtype == torch.float16:
            rule = "fully_shard float32 with MixedPrecisionPolicy(param_dtype=torch.float16)"
            raise ModelError(f"{name} must not be float16, in which the square of a gradient below 0.0002 is 0; {rule}")
    return parameters


def _add(
    model: nn.Module,
    parameters: Mapping[str, Any],
    batch: Batch,
    noise: Tensor,
    objective: Objective,
    cotangents: kinds.Cotangents,
    sums: dict[str, Tensor],
    square: bool,
) -> None:
    """Add the squares of a batch. All processes make the same number of passes: at its end some repeat a sample, with weight 0."""
    samples, rank, size = size_of(batch), processes.rank(), processes.world_size()
    for start in range(0, samples, size):
        index = start + rank
        counts, row = index < samples, slice(min(index, samples - 1), min(index, samples - 1) + 1)
        sample, drawn, number, passes = take(batch, row), noise[row], 0, 1
        while number < passes:  # a graph is used up by its backward pass: FSDP2 frees the weights it gathered
            with torch.enable_grad():
                logits = objective.logits(model, fresh(sample))
            sent = cotangents(logits.detach(), objective.targets(sample), drawn)
            passes = len(sent)
            logits.backward(sent[number].to(logits.dtype) * float(counts))
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    shard = local(parameter.grad).double()
                    sums[name].add_(shard.square() if square else shard)
                    parameter.grad = None
            number += 1


@contextmanager
def _squaring(model: nn.Module, parameters: Mapping[str, Any]) -> Iterator[bool]:
    """Let FSDP2 square gradients before it adds them up, and leave everything as it was; yields whether the caller has to square them,
    as with a single process, where FSDP2 reduces nothing."""
    groups, device = _groups(model), device_of(model)
    before = [(group, name, getattr(group, name)) for group in groups for name in (COMM, *SETTINGS)]
    gradients = [(value, value.grad, getattr(value, HOOKS, None)) for value in parameters.values()]
    try:
        for group in groups:
            for name, value in {COMM: _Squares(getattr(group, COMM)), **SETTINGS}.items():
                setattr(group, name, value)
        for parameter, _, hooks in gradients:
            parameter.grad = None
            if hooks:  # an optimizer that steps in the backward pass
                setattr(parameter, HOOKS, None)
        with torch.inference_mode(False), seeded(0, device), in_mode(model, training=False), unchanged(model), safe_norms(model):
            yield processes.world_size() == 1
    finally:
        for group, name, value in before:
            setattr(group, name, value)
        for parameter, gradient, hooks in gradients:
            parameter.grad = gradient
            if hooks:
                setattr(parameter, HOOKS, hooks)


def _groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters, which reduce their gradients together; checked, since they are no public part of torch."""
    from torch.distributed.fsdp import FSDPModule

    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    listed = [getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)] for state in states]
    groups = [group for several in listed for group in several if group is not None]
    names = (COMM, *SETTINGS, "reduce_grads", "fsdp_params")
    if not groups or any(not hasattr(group, name) for group in groups for name in names):
        raise ModelError(f"FSDP2 of torch {torch.__version__} keeps its parameters in a way that is not known here; use 2.11 or 2.13")
    if any(not group.reduce_grads or any(_pending(part) for part in group.fsdp_params) for group in groups):
        rule = "call set_requires_gradient_sync(True), and let a backward pass add up what has been accumulated"
        raise ModelError(f"the model must not be accumulating gradients on each process, where squares would not be added up; {rule}")
    return groups


def _pending(part: Any) -> bool:
    """Whether a parameter of FSDP2 has gradients that no process has added up yet."""
    unsharded = getattr(part, "_unsharded_param", None)
    return any(gradient is not None for gradient in (part.unsharded_accumulated_grad, getattr(unsharded, "grad", None)))


class _Squares:
    """FSDP2's own way to reduce gradients into shards, of their squares: Σ_r g_r² goes to the process that holds the shard."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In float32 at least: in float16, the square of a gradient below 0.0002 is 0."""
        allocated: Tensor = self.original.allocate(size, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return allocated

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self.original(output_tensor, input_tensor.square_(), group, distributed.ReduceOp.SUM, async_op)
