"""Capture graphs from the first batch on, where this process has made such passes before and audited what they add.

What depends on the model's weights and code is compared in every call all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from expunge.data.batches import batch_size
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.planning.passes import Pass
from expunge.fisher.planning.plan import Plan
from expunge.runtime.cuda_graphs import GraphedStep, form_of
from expunge.runtime.nested import Batch

MOST = 4096  # of each
_made: set[int] = set()  # what passes that were made without a graph depend on: their kernels are loaded
_audited: set[int] = set()  # forms of operations whose sums of squares were found right


class FamiliarStep:
    """The passes of a plan as CUDA graphs: captured from the second batch of a form on; at once, where the process has made such a pass.

    An audit makes its pass eager, since it is read. It shows that what is added are the squares of the rows, which is a matter of the
    forms of operations: where each was audited before, in a batch of this size, a pass by a plan that was not surveyed needs none.
    `settings`: what passes depend on beside the plan and the batch.
    """

    def __init__(self, step: Callable[..., Pass], plan: Plan, settings: Hashable) -> None:
        self.step, self.plan, self.settings = step, plan, settings
        self._graphed = self._new()
        self._begun = self._known = False
        self._form: Hashable = None  # of the first batch

    def __call__(self, given: Batch, audit: Audit | None = None) -> Pass:
        form = form_of(given)
        if self._begun:
            return self._pass(given, None if self._known and form == self._form else audit)
        self._begun, self._form = True, form
        signature = hash((form, self._rounding(), tuple(self.plan.layouts.items()), tuple(self.plan.idle), self.plan.surveyed))
        if form is not None and signature in _made:
            self._graphed.skip_eager(given)
            result = self._pass(given)
            if not self._graphed.capturable:  # without an eager pass before
                _made.discard(signature)
                self._graphed = self._new()
            self._known = self.plan.surveyed or self._forms(given, result) <= _audited
            if self._known:
                return result
            self._graphed = self._new()
        result = self._pass(given, audit)
        if (audit is not None or self.plan.surveyed) and not (result.unexpected or result.wrong or result.silent):
            _add(_made, {signature})
            _add(_audited, self._forms(given, result) if audit is not None else set())
        return result

    def _pass(self, given: Batch, audit: Audit | None = None) -> Pass:
        return self._graphed(given) if audit is None else self._graphed(given, audit)

    def _new(self) -> GraphedStep[Pass]:
        return GraphedStep(self.step, warm=1, lasting=False)

    def _forms(self, given: Batch, result: Pass) -> set[int]:
        return {hash((form, batch_size(given[0]), self._rounding())) for form in result.forms}

    def _rounding(self) -> Hashable:
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return self.settings, tf32.in_matmuls(), tf32.in_convolutions(), autocast


def _add(known: set[int], new: set[int]) -> None:
    if len(known) + len(new) > MOST:
        known.clear()
    known |= new


def forget() -> None:
    """As if the process had made no pass."""
    _made.clear()
    _audited.clear()
