"""Find operations of a forward pass that may let one sample act on another, by the shapes that change with the number of samples.

A coupling that few samples show (an expert that is full, a clip at the largest value of the batch) hardly shows in samples that are drawn.
It needs an operation that reduces over the samples, runs along them, or pairs them. Where there is one, all samples are compared. So they
are where rows are joined along the samples, maybe in another order than before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from expunge.fisher.planning.operations import Operation

# Operations that run along a dimension whose size stays; the place of that argument.
RUNNING = {"cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "logcumsumexp": 1, "softmax": 1, "log_softmax": 1, "softmin": 1}
RUNNING |= {"sort": 1, "argsort": 1, "topk": 2, "normalize": 2}
JOINING = set("cat concat concatenate stack vstack".split())  # likewise of their outputs; the place is 1
REDUCING = set("any all sum max min amax amin count_nonzero argmax argmin median mode prod".split())
# Outputs that do not hold the samples' numbers, or hold those of one.
TAKING = set("__getitem__ unbind __iter__ select split chunk tensor_split narrow new_zeros new_ones new_empty new_full new_tensor".split())

Shape = tuple[int, ...]


class _Shapes(NamedTuple):
    label: str
    inputs: list[Shape]
    output: Shape
    size: int  # of the dimension that it runs along, or joins tensors along


class Mixing:
    """Notes the shapes of a forward pass's operations. `by_a_number`: data met a whole number, or a yes or no, that other data gave, as in
    `x * (x > 2).any()`."""

    def __init__(self) -> None:
        self.operations: list[_Shapes] = []
        self.by_a_number = False
        self._numbers: dict[int, Tensor] = {}  # held, so that no other tensor gets its id

    def note(self, operation: Operation) -> None:
        inputs, outputs, label = operation.operands, operation.outputs, operation.label
        if not inputs or not outputs:
            return
        if not outputs[0].dim() and not outputs[0].is_floating_point():  # `mask.all()`, `mask.sum()`: asked about padding
            if label in REDUCING or any(id(each) in self._numbers for each in inputs):
                self._numbers[id(outputs[0])] = outputs[0]
            return
        self.by_a_number |= any(id(each) in self._numbers for each in inputs)
        size = 0
        if label in RUNNING or label in JOINING:
            size = _size(label, inputs[0] if label in RUNNING else outputs[0], operation.args, operation.kwargs)
        self.operations.append(_Shapes(label, [tuple(each.shape) for each in inputs], tuple(outputs[0].shape), size))


def comparable(fewer: Mixing, more: Mixing) -> bool:
    """Whether both passes had the same operations."""
    return [one.label for one in fewer.operations] == [one.label for one in more.operations]


def mixes(fewer: Mixing, more: Mixing) -> bool:
    """Whether operations of passes of fewer and of more samples may mix these; yes, where the passes had other operations."""
    return (
        more.by_a_number
        or not comparable(fewer, more)
        or any(_mixes(*pair) for pair in zip(fewer.operations, more.operations, strict=True))
    )


def _mixes(fewer: _Shapes, more: _Shapes) -> bool:
    if fewer.inputs == more.inputs or fewer.label in TAKING or len(fewer.output) != len(more.output):
        return False
    if len(fewer.inputs) != len(more.inputs) or _changed(fewer.output, more.output) != 1 or fewer.size != more.size:
        return True
    return any(_changed(*pair) > 1 for pair in zip(fewer.inputs, more.inputs, strict=True))  # a product with a matrix may move rows


def _changed(fewer: Shape, more: Shape) -> int:
    """How many dimensions have another size; none, where there are others."""
    return sum(one != other for one, other in zip(fewer, more, strict=True)) if len(fewer) == len(more) else 0


def _size(label: str, data: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    place, usual = (RUNNING[label], -1) if label in RUNNING else (1, 0)
    dimension = kwargs.get("dim", args[place] if len(args) > place else usual)
    return data.shape[dimension] if isinstance(dimension, int) and data.dim() else 0
