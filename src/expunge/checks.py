"""What must hold of data and models before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from expunge.batches import Batches, batch_size, tensors
from expunge.errors import DivergedError, InputError, ModelError, naming
from expunge.objective import Batch, Objective, check_labels, cross_entropy, model_outputs


def screened(batches: Batches, argument: str, objective: Objective, logits: torch.Size | None = None) -> Batches:
    """The same batches, each looked at as it goes by, so that large data are not read a second time for it.

    With the shape of a batch of `logits` labels are looked at too.
    """

    def read(seed: int | None) -> Iterator[Batch]:
        for batch in batches.read(seed):
            check_batch(batch, argument, objective)
            if logits is not None and objective.losses is cross_entropy:
                with naming(argument):
                    check_labels(logits, objective.targets(batch))
            yield batch

    return batches.changed(read)


def check_batch(batch: Batch, argument: str, objective: Objective) -> None:
    """Tensors with one sample or more, and finite numbers in them; an entry named a mask may hold infinities, which hide positions."""
    if objective.outputs is model_outputs:
        _check_entries(batch, argument)
    try:
        batch_size(batch)
    except InputError as error:
        raise InputError(argument, error.rule, error.found) from error
    for name, part in batch.items() if isinstance(batch, Mapping) else [("", batch)]:
        for tensor in tensors(part):
            if (bad := _first_bad(tensor, infinite="mask" in str(name))) is not None:
                raise InputError(argument, "inputs and targets must be finite", bad)


def _check_entries(batch: Batch, argument: str) -> None:
    if isinstance(batch, Mapping):  # which may carry names and other things beside its tensors
        strange = [value for value in batch.values() if isinstance(value, numpy.ndarray)]
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        strange = [entry for entry in batch if not tensors(entry)]
    else:
        raise InputError(argument, "a batch must be (inputs, targets) or a mapping of tensors", type(batch).__name__)
    if strange:
        raise InputError(argument, "inputs and targets must be tensors", type(strange[0]).__name__)


def check_model(model: Any) -> None:
    """A module with finite weights whose samples do not depend on each other in eval mode."""
    if not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch.nn.Module", type(model).__name__)
    for name, tensor in _tensors(model):
        # A buffer may be a mask with infinities, as that of causal attention is.
        if (bad := _first_bad(tensor, infinite=not isinstance(tensor, nn.Parameter))) is not None:
            raise ModelError(f"model: {name} must be finite; found {bad}")
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    mixing = [name or "the model itself" for name, module in norms if module.running_mean is None]
    if mixing:
        raise ModelError(f"model: BatchNorm without running statistics mixes samples in eval mode; found {', '.join(mixing)}")


def finite_tensors(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers that hold finite numbers; one wait for the device, however many there are."""
    named = [(name, tensor) for name, tensor in _tensors(model) if tensor.is_floating_point() or tensor.is_complex()]
    if not named:
        return []
    finite = torch.stack([torch.isfinite(tensor.detach()).all().to(named[0][1].device) for _, tensor in named]).tolist()
    return [name for (name, _), holds in zip(named, finite, strict=True) if holds]


def check_finite(model: nn.Module, names: Iterable[str], when: str) -> None:
    """What was finite before must be so still."""
    now = {*finite_tensors(model)}
    if lost := [name for name in names if name not in now]:
        raise DivergedError(f"{', '.join(lost[:4])}{', ...' if lost[4:] else ''} no longer finite {when}")


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _first_bad(tensor: Tensor, infinite: bool) -> float | None:
    """The first number that is none; or an infinity, unless `infinite` allows it."""
    if not tensor.is_floating_point():
        return None
    bad = torch.isnan(tensor) if infinite else ~torch.isfinite(tensor)
    return float(tensor.detach()[bad][0]) if bad.any() else None
