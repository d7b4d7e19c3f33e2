"""Measure how strongly every channel responds to data: sums over samples of its mean activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, as_batches, batch_size, device_of, to_device
from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.model.channels import Layer, channel_axis
from expunge.model.checks import check_module
from expunge.runtime.modes import eager, in_mode, seeded, unchanged
from expunge.runtime.progress import track

# How many numbers are rectified at a time on the CPU: what fits a core's cache and what the allocator reuses. A fresh tensor of
# the size of the layer's output would cost many times the reduction.
PIECE = 1 << 17


@dataclass(frozen=True, eq=False)
class Activations:
    """Σ_i A_ij of each class by layer, and how many samples and batches were summed. Without classes there is one row, of all samples."""

    sums: Mapping[str, Tensor]  # by layer, float64 of shape (classes, channels)
    counts: Tensor  # samples of each class, int64 of shape (classes,)
    batches: int

    def mean(self) -> dict[str, Tensor]:
        """Σ_i A_ij / |class|; not a number where a class has no sample."""
        return {name: total / self.counts[:, None] for name, total in self.sums.items()}


def measure(
    model: nn.Module,
    batches: Data,
    layers: Sequence[Layer],
    objective: Objective = Objective(),
    *,
    classes: Sequence[int] | None = None,
    before_norm: bool = False,
    progress: bool = False,
) -> Activations:
    """Sum every channel's activation over the samples, in eval mode, in one forward pass.

    A_ij = mean over positions of ReLU(BN(z_ij)), z_ij the output of the layer in channel j for sample i; without a BatchNorm of its own,
    or with `before_norm`, ReLU(z_ij). A layer that is called several times has the mean over its calls, one that a batch does not reach
    has 0. With `classes` samples are summed by their label. Positions are summed in the model's type and samples in float64, so the
    result does not depend on order or batch size.

    Paper: table A of section Masking with Activation Values.
    """
    check_module(model)
    device = device_of(model)
    wanted = None if classes is None else torch.tensor(classes, dtype=torch.int64, device=device)[:, None]
    groups, channels = 1 if classes is None else len(classes), [layer.channels for layer in layers]
    sums = torch.zeros(groups, sum(channels), dtype=torch.float64, device=device)
    counts = torch.zeros(groups, dtype=torch.int64, device=device)
    data, read = as_batches(batches), 0
    # Not inference mode: a tensor that the model keeps for later could not be trained with.
    with (
        seeded(0, device),
        in_mode(model, training=False),
        unchanged(model),
        torch.no_grad(),
        eager(),
        _recorded(model, layers, before_norm) as calls,
    ):
        for batch in track(iter(data), "activations", total=data.known, enabled=progress):
            moved, samples = to_device(batch, device), batch_size(batch)
            calls.clear()
            objective.logits(model, moved)
            rows = torch.cat([_by_sample(calls.get(layer.name, []), samples, layer, device) for layer in layers], 1).double()
            if wanted is None:
                sums += rows.sum(0)
                counts += samples
            else:
                members = objective.targets(moved) == wanted
                sums += members.double() @ rows
                counts += members.sum(1)
            read += 1
    parts = sums.split(channels, 1)
    return Activations({layer.name: part for layer, part in zip(layers, parts, strict=True)}, counts, read)


@contextmanager
def _recorded(model: nn.Module, layers: Sequence[Layer], before_norm: bool) -> Iterator[dict[str, list[Tensor]]]:
    """Within the context, mean activations of shape (rows, channels) by layer, one tensor per call."""
    calls: dict[str, list[Tensor]] = {}

    def listener(name: str, axis: int) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, arguments, output: calls.setdefault(name, []).append(rectified_means(output, axis))

    hooks, modules = [], dict(model.named_modules(remove_duplicate=False))
    try:
        for layer in layers:
            name = layer.name if before_norm or layer.norm is None else layer.norm
            if name not in modules:
                raise InputError("layers", "must be layers of this model, as channels.find gives them", repr(name))
            module = modules[name]
            hooks.append(module.register_forward_hook(listener(layer.name, channel_axis(module))))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def rectified_means(values: Tensor, axis: int) -> Tensor:
    """ReLU, then the mean over all dimensions but the first and the channels': shape (rows, channels)."""
    wide = torch.promote_types(values.dtype, torch.float32)
    positions = [dimension for dimension in range(1, values.dim()) if dimension != axis % values.dim()]
    if not positions:
        return values.relu().to(wide)
    rows = len(values) if values.is_cuda else max(1, PIECE * len(values) // max(values.numel(), 1))
    return torch.cat([piece.relu().mean(positions, dtype=wide) for piece in values.split(rows)])


def _by_sample(calls: list[Tensor], samples: int, layer: Layer, device: torch.device) -> Tensor:
    """The mean over the calls, and over the frames where a model folds them into the batch: shape (samples, channels)."""
    if not calls:
        return torch.zeros(samples, layer.channels, device=device)
    if len(calls) == 1 and len(calls[0]) == samples:
        return calls[0]
    if any(len(rows) % samples for rows in calls):
        raise ModelError(f"model: {layer.name} puts out {len(calls[0])} rows for {samples} samples; must be a multiple of the samples")
    means = [rows.double().reshape(samples, -1, layer.channels).mean(1) for rows in calls]
    return torch.stack(means).mean(0)


def labels(batches: Data, argument: str, objective: Objective = Objective()) -> list[int]:
    """The labels that occur, in rising order."""
    distinct: list[Tensor] = []
    for batch in as_batches(batches, argument):
        targets = objective.targets(batch)
        if targets.is_floating_point() or targets.dim() != 1:
            raise InputError(argument, "needs one integer label per sample", f"{targets.dtype} of shape {tuple(targets.shape)}")
        distinct.append(targets.detach().unique().cpu())
    return torch.cat(distinct).unique().tolist()
