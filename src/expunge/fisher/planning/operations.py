"""One operation of a forward pass, with the tensors that it takes and gives: walked once, for all who look at it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expunge.runtime.nested import tensors


class Operation:
    """A function of torch's with what it is called with, and after `gives` with what it gave.

    `name`   the function's, empty where it has none
    `label`  the same, without the underscore of an operation in place
    """

    __slots__ = ("args", "function", "kwargs", "label", "name", "operands", "outputs", "result")

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.name: str = getattr(function, "__name__", "")
        self.label = self.name if self.name.endswith("__") else self.name.rstrip("_")
        self.operands = tensors((*args, *kwargs.values()) if kwargs else args)
        self.result: Any = None
        self.outputs: list[Tensor] = []

    def gives(self, result: Any) -> None:
        self.result = result
        self.outputs = [result] if isinstance(result, Tensor) else tensors(result)
