"""Follow, through a forward pass, the tensors that are the same for all data: the model's own and what is computed from these alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from expunge.runtime.nested import tensors


class Constants:
    """By id, with the tensors kept alive: an id may be used again once its tensor is gone."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in own}

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._known

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation on constants gives constants; one that writes data into a constant ends it."""
        operands = tensors((*args, *kwargs.values()))
        if all(id(tensor) in self._known for tensor in operands):
            self._known |= {id(tensor): tensor for tensor in tensors(result)}
            return
        written = tensors(result) if result is not None else operands[:1]  # `x[place] = data` returns nothing
        for tensor in written:
            self._known.pop(id(tensor), None)
