"""Name an objective and its settings, so that sums of different losses can be told apart."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from reprlib import recursive_repr
from types import CodeType
from typing import Any

import numpy
from torch import Tensor, nn

from expunge.data.objective import Objective, batch_targets, cross_entropy, model_outputs
from expunge.data.tokens import of_tokens
from expunge.storage.tensors import add_bytes, weights_digest

PLAIN = (str, bytes, bool, int, float, complex, type(None))
SHORT = 12  # hexadecimal digits
LONG = 100  # characters of a setting
ENTRIES = 1000  # of a setting at most: longer ones are data
AGAIN = "..."  # what is being named already: a function that calls itself, a list in itself


def objective_name(objective: Objective, kind: str = "empirical") -> str:
    """The loss, its settings, and the functions that give outputs and targets where these are the caller's own.

    A kind that takes the model's own distribution does not ask the loss. An objective keeps the name that it had at first: what a function
    counts or notes from call to call makes no other loss of it.
    """
    try:
        return _known(objective, kind)
    except TypeError:  # functions without a hash
        return _first(objective, kind)


def _first(objective: Objective, kind: str) -> str:
    losses = _name(objective.losses) if objective.losses is not cross_entropy else "cross_entropy"
    distribution = "own distribution of tokens" if of_tokens(objective) else "own distribution"
    parts = [losses] if kind in ("empirical", "absolute", "loss-batch") else [distribution]
    own: dict[str, Any] = {"outputs": (objective.outputs, model_outputs), "targets": (objective.targets, batch_targets)}
    parts += [f"{argument}={_name(function)}" for argument, (function, default) in own.items() if function is not default]
    return ", ".join(parts)


_known = functools.lru_cache(maxsize=4)(_first)  # few, since it holds on to what the functions refer to


def listed(parameters: Collection[str]) -> str:
    """Names of parameters, for a comparison: how many, and a digest of all."""
    return f"{len(parameters)}, names with {hashlib.sha256(chr(10).join(parameters).encode()).hexdigest()}"


@recursive_repr(AGAIN)
def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        settings = [_value(value) for value in function.args] + [
            f"{key}={_value(value)}" for key, value in sorted(function.keywords.items())
        ]
        return f"{_name(function.func)}({', '.join(settings)})"
    if isinstance(function, nn.Module):
        tensors = weights_digest(function)[:SHORT] if [*function.parameters(), *function.buffers()] else ""
        return f"{type(function).__qualname__}({_settings(vars(function))}){tensors}"
    code = getattr(function, "__code__", None)
    if code is None:  # an object that can be called, or a function of C
        own = getattr(function, "__qualname__", None)
        return own or _object(function)
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=True)
    settings = [f"{name}={_cell(cell)}" for name, cell in cells]
    settings += [f"{name}={_value(value)}" for name, value in _defaults(function, code).items()]
    if (owner := getattr(function, "__self__", None)) is not None:  # of a method
        settings.append(f"self={_name(owner) if callable(owner) else _object(owner)}")
    # A function of one's own keeps its name when its text is changed.
    return f"{function.__qualname__}({', '.join(settings)}){_digest(code)}"


def _defaults(function: Any, code: CodeType) -> dict[str, Any]:
    values = getattr(function, "__defaults__", None) or ()
    arguments = code.co_varnames[: code.co_argcount]
    return dict(zip(arguments[len(arguments) - len(values) :], values, strict=True)) | (getattr(function, "__kwdefaults__", None) or {})


@recursive_repr(AGAIN)
def _object(value: Any) -> str:
    return f"{type(value).__qualname__}({_settings(getattr(value, '__dict__', {}))})"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in sorted(values.items()) if not key.startswith("_") and key != "training")


def _cell(cell: Any) -> str:
    try:
        return _value(cell.cell_contents)
    except ValueError:  # not set yet
        return "?"


@recursive_repr(AGAIN)
def _value(value: Any) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        digest = hashlib.sha256(str((value.dtype, tuple(value.shape))).encode())
        with suppress(RuntimeError):  # numbers that cannot be read: on the meta device, sparse, left over from torch.func
            add_bytes(digest, value)
        return digest.hexdigest()[:SHORT]
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.hasobject:  # whose bytes are addresses
            return _value(value.tolist())
        return hashlib.sha256(str((value.dtype, value.shape)).encode() + value.tobytes()).hexdigest()[:SHORT]
    if isinstance(value, (tuple, list, dict)) and len(value) <= ENTRIES:
        parts = [f"{key!r}: {_value(part)}" for key, part in value.items()] if isinstance(value, dict) else map(_value, value)
        text = ", ".join(parts)
        return f"[{text if len(text) <= LONG else hashlib.sha256(text.encode()).hexdigest()[:SHORT]}]"
    if getattr(value, "__self__", None) is not None:  # a method, perhaps of the object that is being named
        return value.__qualname__
    return _name(value) if callable(value) and not isinstance(value, type) else type(value).__qualname__


def _digest(code: CodeType) -> str:
    constants = [part for part in code.co_consts if isinstance(part, PLAIN)]
    text = repr((code.co_code, constants, code.co_names))
    inner = "".join(_digest(part) for part in code.co_consts if isinstance(part, CodeType))
    return hashlib.sha256((text + inner).encode()).hexdigest()[:SHORT]
