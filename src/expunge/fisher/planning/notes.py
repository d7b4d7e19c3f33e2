"""What a survey notes of every operation of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from expunge.fisher.planning.constants import Constants
from expunge.fisher.planning.mixing import Mixing
from expunge.fisher.planning.operations import Operation
from expunge.fisher.planning.provenance import Provenance
from expunge.fisher.planning.work import Work


class Notes:
    """`chosen`: the parameters used on rows that were chosen by their content, which its `provenance` follows; the `work` behind their
    gradients; and the shapes of all operations, by which samples may be `mixing`."""

    def __init__(self, names: Mapping[int, str], constants: Constants) -> None:
        self.names = names
        self.chosen: set[str] = set()
        self.provenance, self.work, self.mixing = Provenance(constants), Work(names), Mixing()

    def add(self, operation: Operation) -> None:
        if self.provenance.chosen(operation.operands):
            direct = (id(value) for value in (*operation.args, *operation.kwargs.values()) if isinstance(value, Tensor))
            self.chosen.update(self.names[place] for place in direct if place in self.names)
        self.provenance.note(operation)
        self.work.note(operation)
        self.mixing.note(operation)
