"""Check data and models before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from expunge.data.batches import Batches, batch_size
from expunge.data.objective import Batch, Objective, model_outputs
from expunge.errors import DivergedError, InputError, ModelError, naming
from expunge.runtime.nested import tensors
from expunge.storage.sharded import is_sharded, shards_itself
from expunge.validate import shown


def screened(batches: Batches, argument: str, objective: Objective, logits: torch.Size | None = None) -> Batches:
    """The same batches, each checked as it is read, so that large data are not read a second time.

    With the shape of a batch of `logits`, labels are checked too.
    """

    def read(seed: int | None) -> Iterator[Batch]:
        for batch in batches.read(seed):
            check_batch(batch, argument, objective)
            if logits is not None:
                with naming(argument):
                    objective.check_batch(logits, batch)
            yield batch

    return batches.changed(read)


def check_batch(batch: Batch, argument: str, objective: Objective) -> None:
    """Tensors of one sample or more, with finite numbers; an entry whose name contains `mask` may hold infinities, which hide positions."""
    if objective.outputs is model_outputs:
        _check_entries(batch, argument)
    try:
        batch_size(batch)
    except InputError as error:
        raise InputError(argument, error.rule, error.found) from error
    for name, part in batch.items() if isinstance(batch, Mapping) else [("", batch)]:
        for tensor in tensors(part):
            if tensor.layout is not torch.strided or tensor.is_nested:
                form = "a nested tensor" if tensor.is_nested else str(tensor.layout)
                raise InputError(argument, "tensors must be dense; give tensor.to_dense(), or pad and pass a mask", form)
            if (bad := _first_bad(tensor, infinite="mask" in str(name))) is not None:
                raise InputError(argument, "inputs and targets must be finite", bad)


def _check_entries(batch: Batch, argument: str) -> None:
    if isinstance(batch, Mapping):  # which may carry names and other things beside its tensors
        strange = [value for value in batch.values() if isinstance(value, numpy.ndarray)]
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        strange = [entry for entry in batch if not tensors(entry)]
    else:
        raise InputError(argument, f"a batch must be (inputs, targets) or a mapping of tensors{_advice(batch)}", _kind(batch))
    if strange:
        raise InputError(argument, "inputs and targets must be tensors", _kind(strange[0]))


def _advice(batch: Any) -> str:
    """What to give in place of an array alone, which may be the numbers of rows, or of several datasets."""
    if isinstance(batch, Dataset):
        return "; give one dataset for each argument: a scenario is unpacked, as in unlearn(model, *scenario)"
    if not isinstance(batch, (Tensor, numpy.ndarray)):
        return ""
    if batch.ndim == 1 and str(batch.dtype).rpartition(".")[2].startswith(("int", "bool")):
        return "; for rows of a dataset give torch.utils.data.Subset(dataset, rows)"
    return "; give all samples at once as a tuple (inputs, labels)"


def _kind(value: Any) -> str:
    """The type of a thing, of what it holds, and what to do with it."""
    if isinstance(value, (list, tuple)) and value:
        advice = "encode text first" if isinstance(value[0], str) else "torch.as_tensor first"
        return f"a {type(value).__name__} of {type(value[0]).__name__} ({advice})"
    return f"{type(value).__name__}{' (torch.as_tensor first)' if isinstance(value, (numpy.ndarray, numpy.generic, float, int)) else ''}"


def check_module(model: Any, argument: str = "model") -> None:
    """A module whose weights have values: none that the first call would make (lazy), none on the meta device."""
    if isinstance(model, type):
        raise InputError(argument, f"must be a torch.nn.Module, built, as in {model.__name__}(...)", f"the class {model.__name__}")
    if not isinstance(model, nn.Module):
        raise InputError(argument, "must be a torch.nn.Module", type(model).__name__)
    for name, tensor in _tensors(model):
        if is_lazy(tensor):
            raise ModelError(f"{argument}: {name} has no shape yet; call the model once on a batch first")
        if tensor.is_meta:
            raise ModelError(f"{argument}: {name} is on the meta device and has no values; give the model its weights first")


def check_unsharded(model: nn.Module, instead: str, argument: str = "model") -> None:
    """A module that this process has all of: processes that share work by themselves would wait for each other's shards forever."""
    sharded = [name for name, tensor in _tensors(model) if is_sharded(tensor)]
    sharded += [
        name or "it"
        for name, module in model.named_modules()
        if type(module).__name__ == "FullyShardedDataParallel" or shards_itself(module)
    ]
    if sharded:
        raise ModelError(f"{argument}: must not be sharded, and {sharded[0]} is (FSDP); {instead}")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.process_group.size() > 1:
            rule = f"must not hold a DistributedDataParallel, whose passes wait for other processes, and {name or 'it'} is one"
            raise ModelError(f"{argument}: {rule}; give the model with the module that it wraps")


def check_model(model: Any) -> None:
    """A module with finite weights whose samples do not depend on each other in eval mode."""
    check_module(model)
    for name, tensor in [] if _surely_finite(model) else _tensors(model):
        # A buffer may be a mask with infinities, as that of causal attention is.
        if (bad := _first_bad(tensor, infinite=not isinstance(tensor, nn.Parameter))) is not None:
            raise ModelError(f"model: {name} must be finite; found {bad}")
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    mixing = [name or "the model itself" for name, module in norms if module.running_mean is None]
    if mixing:
        raise ModelError(f"model: BatchNorm without running statistics mixes samples in eval mode; found {', '.join(mixing)}")


def check_names(argument: str, names: Any) -> tuple[str, ...]:
    """One name or several, in a sequence, as they are."""
    try:
        listed = (names,) if isinstance(names, str) else tuple(names)
    except TypeError:
        listed = ()
    if not listed or not all(isinstance(name, str) for name in listed):
        rule = "must be one or more names of the model's parameters, such as ('fc.weight', 'fc.bias'), or None"
        raise InputError(argument, rule, shown(names))
    return listed


def finite_tensors(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers that hold finite numbers; one wait for the device, whatever their number."""
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


def _surely_finite(model: nn.Module) -> bool:
    """Whether all weights of a model on one GPU are finite, with one wait for it; False too where they have to be looked at one by one."""
    weights = [tensor.detach() for _, tensor in _tensors(model) if tensor.is_floating_point() and tensor.numel()]
    if not weights or any(not tensor.is_cuda or is_sharded(tensor) or tensor.device != weights[0].device for tensor in weights):
        return False
    return len({tensor.dtype for tensor in weights}) == 1 and bool(torch.stack(torch._foreach_norm(weights)).isfinite().all())


def _first_bad(tensor: Tensor, infinite: bool) -> float | None:
    """The first NaN; or the first infinity, unless `infinite` allows it."""
    if not tensor.is_floating_point():
        return None
    tensor = tensor.detach()
    bad = torch.isnan(tensor) if infinite else ~torch.isfinite(tensor)
    return float(tensor[bad][0]) if bad.any() else None


def sparse_tables(model: nn.Module) -> list[str]:
    """The embeddings whose gradients are sparse tensors, by name."""
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return [name or "the model" for name, module in tables if module.sparse and module.weight.requires_grad]
