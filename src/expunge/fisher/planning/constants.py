"""Follow, through a forward pass, the tensors that are the same for all data: the model's own and what is computed from these alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from expunge.fisher.planning.operations import Operation


class Constants:
    """By id, with the tensors kept alive: an id may be used again once its tensor is gone."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in own}

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._known

    def note(self, operation: Operation) -> None:
        """An operation on constants gives constants; one that writes data into a constant ends it."""
        if all(id(tensor) in self._known for tensor in operation.operands):
            self._known |= {id(tensor): tensor for tensor in operation.outputs}
            return
        written = operation.outputs if operation.result is not None else operation.operands[:1]  # `x[place] = data` returns nothing
        for tensor in written:
            self._known.pop(id(tensor), None)
