"""Count, by parameter, the multiplications behind its gradient in one pass, and note the operations it is used in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from expunge.fisher.planning.derived import DESCRIBING
from expunge.fisher.planning.operations import Operation

LABELS = {"addmm": "linear", "matmul": "linear", "__matmul__": "linear", "linear": "linear", "embedding": "embedding"}
FIRST_IS_INPUT = {"addmm", "matmul", "__matmul__", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}  # in the weight's shape


class Work:
    """`multiplications` and `operations` (their names) by parameter."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.multiplications: Counter[str] = Counter()
        self.operations: dict[str, set[str]] = {}
        self.entries = 0  # of the outputs of these operations

    def note(self, operation: Operation) -> None:
        label, used = operation.name, [tensor for tensor in operation.operands if id(tensor) in self.names]
        if not used or label in DESCRIBING or operation.function is F.multi_head_attention_forward:  # its linear maps are seen one by one
            return
        entries = sum(tensor.numel() for tensor in operation.outputs)
        self.entries += entries
        kind = _kind(label)
        for tensor in used:
            name = self.names[id(tensor)]
            self.multiplications[name] += entries * _terms(label, kind, tensor)
            self.operations.setdefault(name, set()).add(kind)


def _kind(label: str) -> str:
    if label in LABELS:
        return LABELS[label]
    if label.startswith("conv"):
        return "convolution"
    return "norm" if label.endswith("_norm") else label.strip("_")


def _terms(label: str, kind: str, parameter: Tensor) -> int:
    """How many entries of the parameter an entry of the output is made of."""
    if parameter.dim() < 2 or kind in ("embedding", "norm", "add", "mul", "sub", "getitem"):
        return 1
    outputs = parameter.shape[1] if label in FIRST_IS_INPUT else parameter.shape[0]
    return max(1, parameter.numel() // max(1, outputs))
