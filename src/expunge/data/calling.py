"""Call a model with a batch, and explain what is wrong where the model cannot take it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from expunge.errors import ExpungeError, InputError
from expunge.runtime.nested import tensors

WHOLE = r"\b(byte|char|short|int|long|bool|u?int\d+)\b"  # types that an error names
# What a forward pass or a loss raises for inputs that are not its own. Others (Ctrl-C, a full disk) are not about the inputs.
RAW = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


def call_by_name(model: Callable[..., Any], entries: Mapping[str, Any]) -> Any:
    """Pass entries by keyword; a single entry whose name the model's forward does not know is passed as its first argument.

    Entries without tensors (names, paths) are skipped where the forward does not know them.
    """
    known = _keywords(model)
    if known is None:
        return model(**entries)
    used = {name: value for name, value in entries.items() if name in known or tensors(value)}
    if all(name in known for name in used):
        return model(**used)
    if len(used) == 1 and not isinstance(known, _Keywords):
        return model(*used.values())
    rule = f"the model's forward takes {', '.join(known) or 'nothing'}; rename the entries of the mapping, or give Objective(outputs=...)"
    raise InputError("batches", rule, f"the keys {', '.join(map(str, entries))}")


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def not_about_inputs(error: BaseException) -> bool:
    """Whether it is one of our own errors, or one of the machine's: memory, a broken device."""
    return isinstance(error, ExpungeError) or out_of_memory(error) or "CUDA error" in str(error)


def unusable(model: Any, batch: Any, error: BaseException) -> InputError:
    """The error to raise for a raw one in a forward pass: the layer it came from, its message, the batch, and what may help."""
    layer, where = _failed_in(model, error)
    advice = _advice(model, batch, layer, str(error))
    rule = f"must be what the model ({_class_name(model)}) takes; {where}raised {error_summary(error)}{advice}"
    return InputError("batches", rule, described(batch))


def error_summary(error: BaseException) -> str:
    """The kind of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def described(batch: Any) -> str:
    """The types and shapes of the entries of a batch."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {described(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)) and tensors(batch):
        return f"({', '.join(map(described, batch))})"
    return type(batch).__name__


def _advice(model: Any, batch: Any, layer: nn.Module | None, message: str) -> str:
    """How to fix the two commonest mistakes: inputs of another type than the weights, and channels last."""
    inputs = [] if isinstance(layer, nn.Embedding) else tensors(batch[:-1] if isinstance(batch, (tuple, list)) else batch)
    if not isinstance(model, nn.Module) or not inputs:
        return ""
    types = {tensor.dtype for tensor in [*model.parameters(), *model.buffers()] if tensor.is_floating_point()}
    strange = [tensor.dtype for tensor in inputs if tensor.is_floating_point() and tensor.dtype not in types]
    if not any(tensor.is_floating_point() for tensor in inputs) and re.search(WHOLE, message, re.IGNORECASE):
        strange = [inputs[0].dtype]
    if strange and len(types) == 1:
        actual, wanted = (str(dtype).removeprefix("torch.") for dtype in (strange[0], *types))
        how = ".float()" if wanted == "float32" else f".to(torch.{wanted})"
        return f" (inputs are {actual} and the model's weights {wanted}: convert the inputs with {how})"
    if isinstance(layer, _ConvNd):
        channels, dimensions = layer.in_channels, len(layer.kernel_size) + 2
        if any(tensor.dim() == dimensions and tensor.shape[1] != channels == tensor.shape[-1] for tensor in inputs):
            return " (channels come first: give inputs.movedim(-1, 1))"
    return ""


def _failed_in(model: Any, error: BaseException) -> tuple[nn.Module | None, str]:
    """The innermost module of the model that the error came through, and its name and form."""
    names = {module: name for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    trace, layer = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function's
            known = trace.tb_frame.f_locals
            owner = known.get("self")
            layer = owner if isinstance(owner, nn.Module) and owner in names else layer
            if isinstance(known, dict):  # up to Python 3.12 a copy that is kept, with the error, and so with all that the model computed
                known.clear()
        trace = trace.tb_next
    if layer is None or layer is model:
        return layer, ""
    form = repr(layer)
    return layer, f"{names[layer]}, {type(layer).__name__ if len(form.splitlines()) > 1 else form}, "


def _class_name(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)


class _Keywords(tuple[str, ...]):
    """Names of a forward that takes nothing by place."""


def _keywords(model: Any) -> tuple[str, ...] | None:
    """The names the model's forward takes; None where it takes any, or where they are unknown."""
    forward = getattr(model, "forward", model)
    function = getattr(forward, "__func__", None)
    try:
        names = _named(forward) if function is None else _named_in_class(function)
    except (TypeError, ValueError):
        return None
    if names is None and type(model).__module__.startswith("torch."):  # wrappers: compiled models, DataParallel
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        return _keywords(inner) if isinstance(inner, nn.Module) else None
    return names


@lru_cache(maxsize=256)
def _named_in_class(function: Callable[..., Any]) -> tuple[str, ...] | None:
    return _named(function, skipped=1)


def _named(function: Callable[..., Any], skipped: int = 0) -> tuple[str, ...] | None:
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    kinds = {parameter.kind for parameter in parameters}
    names = (parameter.name for parameter in parameters if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY))
    return _Keywords(names) if kinds <= {inspect.Parameter.KEYWORD_ONLY} else tuple(names)
