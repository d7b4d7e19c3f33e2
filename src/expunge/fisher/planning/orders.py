"""Tell by the values of a forward pass in which order an operation's rows are: those of one sample are the same beside another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from expunge.fisher.planning.constants import Constants
from expunge.fisher.planning.derived import DESCRIBING
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.planning.operations import Operation

Rows = tuple[Tensor, Tensor]  # of the samples by a layout, (samples, ...), and what the first has alone, (1, ...)


class Met:
    """What the operations gave in which a parameter, or a tensor made of it and of constants, met the data; by the parameter's name."""

    def __init__(self, names: Mapping[int, str], constants: Constants) -> None:
        self._names, self._constants = names, constants
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}  # by id, with the tensors kept alive
        self._outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def __getitem__(self, name: str) -> list[Tensor]:
        return self._outputs[name]

    def note(self, operation: Operation) -> None:
        """Once the constants have noted it."""
        names = frozenset[str]().union(*map(self._of, operation.operands))
        if not names or operation.name in DESCRIBING:
            return
        for tensor in operation.outputs or operation.operands[:1]:  # `x[place] = p` gives nothing
            if tensor in self._constants:
                self._made[id(tensor)] = tensor, names
                continue
            self._made.pop(id(tensor), None)  # data were written to it
            for name in names:
                self._outputs[name].append(tensor.detach())

    def _of(self, tensor: Tensor) -> frozenset[str]:
        if id(tensor) in self._made:
            return self._made[id(tensor)][1]
        return frozenset((self._names[id(tensor)],)) if id(tensor) in self._names else frozenset()


def fitting(layouts: list[Layout], alone: Sequence[Tensor], together: Sequence[Tensor], samples: int) -> list[tuple[Layout, list[Rows]]]:
    """Of several layouts, or of one of several uses, those that may fit, with the rows by which the first of these samples must have
    those that it has alone.

    `alone`, `together`: what the operations gave where the parameter's uses, or what is made of it, met the data. None where these are
    others beside another sample; of one use all layouts, where they are not known.
    """
    uses = 1 + len(layouts[0].others) if layouts[0].others else len(together)
    known = len(alone) == len(together) == uses
    if uses <= 1 and len(alone) <= 1 and (len(layouts) == 1 or not known):
        return [(layout, []) for layout in layouts]
    found = []
    for layout in layouts if known else ():
        rows = list[Rows]()
        for use, (one, more) in enumerate(zip(alone, together, strict=True)):
            own = layout.of_use(use) if layout.others else layout
            if own is None or own.frames == 0 or not (more.is_floating_point() or more.is_complex()):
                continue
            one, more = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (one, more))
            if not own.fits(tuple(more.shape), samples):
                break
            here, single = own.rows(more, samples), own.rows(one, 1)
            if here.shape[1:] == single.shape[1:]:  # alone a sample may be padded to another length
                rows.append((here, single))
        else:
            found.append((layout, rows))
    return found
