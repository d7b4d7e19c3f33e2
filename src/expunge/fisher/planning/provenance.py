"""Follow tensors of a forward pass whose rows may be in an order, or of a number, that depends on their content.

Two samples cannot show it: where the first two happen to be as long, or in order, everything looks regular. So rows that were chosen by
content (unpadded tokens, experts that tokens are sent to, sorted values) are followed from where they were chosen; operations on them
get no closed form. Rows that are written back to their places are regular again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from expunge.fisher.planning.constants import Constants
from expunge.fisher.planning.operations import Operation
from expunge.runtime.nested import tensors

# Operations that choose or order rows where their dimension is the first; the place of that argument.
CHOOSING = {"index_select": 1, "gather": 1, "take_along_dim": 2, "sort": 1, "argsort": 1, "topk": 2, "repeat_interleave": 2}
ALWAYS = set("flipud masked_select take msort unique unique_consecutive _pack_padded_sequence pack_padded_sequence pack_sequence".split())
MOVING = {"flip": 1, "roll": 2}  # rows to other places, where their dimensions hold the first; the place of that argument
WRITING = set("__setitem__ index_copy index_add index_put index_fill scatter scatter_add scatter_reduce masked_scatter".split())
JOINING = set("cat concat concatenate vstack".split())
ALIGNING = set("stack pad_sequence pad_packed_sequence _pad_packed_sequence".split())


class Provenance:
    """Follows every operation of a forward pass; `constants` are followed beside it."""

    def __init__(self, constants: Constants) -> None:
        self._constant = constants
        self._chosen: dict[int, Tensor] = {}  # by id, with the tensors kept alive
        self._single: dict[int, Tensor] = {}  # taken out of the batch by number: they may be of different lengths

    def chosen(self, operands: Iterable[Tensor]) -> bool:
        """Whether one of these has rows chosen by content."""
        return any(id(tensor) in self._chosen for tensor in operands)

    def note(self, operation: Operation) -> None:
        label, args, kwargs, outputs = operation.label, operation.args, operation.kwargs, operation.outputs
        if label in WRITING:
            self._mark(outputs, self._chosen, self.chosen(tensors(args[:1])))
        elif label in ALIGNING:
            self._mark(outputs, self._chosen, self.chosen(operation.operands))
        else:
            single = any(id(tensor) in self._single for tensor in operation.operands)
            joined = label in JOINING and kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0
            chosen = self.chosen(operation.operands) or self._chooses(label, args, kwargs) or (single and joined)
            self._mark(outputs, self._chosen, chosen)
            self._mark(outputs, self._single, (single and not chosen) or self._takes_one(label, args, kwargs))

    def _mark(self, outputs: list[Tensor], where: dict[int, Tensor], condition: bool) -> None:
        if condition:
            where |= {id(tensor): tensor for tensor in outputs}

    def _fixed(self, value: Any) -> bool:
        return value in self._constant

    def _chooses(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it chooses rows of data by content. Rows of a table of the model's lie as their indices do."""
        if not args or self._fixed(args[0]):
            return False
        if label in ALWAYS:
            return True
        if label == "__getitem__":
            return self._indexes(args[0], args[1])
        if label == "repeat_interleave" and not isinstance(kwargs.get("repeats", args[1] if len(args) > 1 else None), Tensor):
            return False
        if label in MOVING:
            return self._moves(args[0], args[MOVING[label] :], kwargs)
        if label not in CHOOSING:
            return False
        place = CHOOSING[label]
        dimension = kwargs.get("dim", args[place] if len(args) > place else None)
        if dimension is None and label in ("sort", "argsort", "topk"):
            dimension = -1
        return dimension is None or dimension % max(1, args[0].dim()) == 0

    def _moves(self, data: Tensor, dimensions: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = kwargs.get("dims", dimensions[0] if len(dimensions) == 1 else dimensions)
        turned = (given,) if isinstance(given, int) else tuple(given)
        return not turned or any(dimension % max(1, data.dim()) == 0 for dimension in turned)

    def _indexes(self, data: Any, index: Any) -> bool:
        parts = index if isinstance(index, tuple) else (index,)
        first = next((part for part in parts if part is not None), None)
        if any(isinstance(part, Tensor) and part.dtype == torch.bool and not self._fixed(part) for part in parts):
            return True
        if isinstance(first, list):
            return first != list(range(len(first)))
        if not isinstance(first, Tensor):
            return False
        if first.dtype == torch.bool:
            return True
        # Each row by its own number, as in x[arange(N), last] and mask[arange(N)[:, None, None], columns], leaves the rows where they are.
        dimensions = max(part.dim() for part in parts if isinstance(part, Tensor))
        leading = 0 < first.dim() == dimensions and first.numel() == len(first)
        return not (self._fixed(first) and leading and torch.equal(first.flatten().cpu(), torch.arange(len(first))))

    def _takes_one(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not args or self._fixed(args[0]):
            return False
        if label == "__getitem__":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            return bool(parts) and isinstance(parts[0], int) and not isinstance(parts[0], bool)
        if label == "split" and isinstance(args[1], int):
            return False  # equal parts
        place = {"unbind": 1, "select": 1, "split": 2, "split_with_sizes": 2, "__iter__": 1}.get(label)
        return place is not None and kwargs.get("dim", args[place] if len(args) > place else 0) == 0
