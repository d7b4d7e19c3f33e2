"""Graph passes that this process has made before from their first batch on: their kernels are loaded, and what these add was audited.

What depends on the model's weights and code rather than on shapes is compared in every call all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.planning.passes import Pass
from expunge.fisher.planning.survey import Plan
from expunge.runtime.cuda_graphs import GraphedStep, form_of
from expunge.runtime.nested import Batch

MOST = 1024  # passes, of two numbers each
_paths: dict[int, int | None] = {}  # by signature, the path of the pass (`Pass.path`); None where it cannot be captured at once


class FamiliarStep:
    """The passes of a plan as CUDA graphs: captured from the second batch of a form on, and at once where the process knows the pass.

    An audit makes its pass eager, since it must be read. A pass of the same plan, form and settings, with the same operations and shapes
    in the same order, was audited before and is not again: of an obvious plan it shows that the sums of squares are right, which is a
    matter of shapes. `settings`: what else the pass depends on.
    """

    def __init__(self, step: Callable[..., Pass], plan: Plan, settings: Hashable) -> None:
        self.step, self.plan, self.settings = step, plan, settings
        self._graphed, self._begun = self._new(), False

    def __call__(self, given: Batch, audit: Audit | None = None) -> Pass:
        if self._begun:
            return self._eagerly_or_graphed(given, audit)
        self._begun, signature = True, self._signature(given)
        path = _paths.get(signature) if signature is not None else None
        if signature is not None and path is not None:
            self._graphed.skip_eager(given)
            result = self._graphed(given)
            if result.path == path and self._graphed.capturable:
                return result
            self._graphed = self._new()
            if result.path == path:
                _paths[signature] = None
                return result
        result = self._eagerly_or_graphed(given, audit)
        sound = not (result.unexpected or result.wrong or result.silent)
        if sound and (audit is not None or self.plan.surveyed):
            _remember(signature, result.path)
        return result

    def _eagerly_or_graphed(self, given: Batch, audit: Audit | None) -> Pass:
        return self._graphed(given) if audit is None else self._graphed(given, audit)

    def _new(self) -> GraphedStep[Pass]:
        return GraphedStep(self.step, warm=1, lasting=False)

    def _signature(self, given: Batch) -> int | None:
        """None where what is given may change out of sight."""
        form = form_of(given)
        if form is None:
            return None
        rounding = tf32.in_matmuls(), tf32.in_convolutions(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        plan = tuple(self.plan.layouts.items()), tuple(self.plan.idle), self.plan.surveyed
        return hash((form, plan, self.settings, rounding))


def _remember(signature: int | None, path: int) -> None:
    if signature is None or _paths.get(signature, path) is None:
        return
    if len(_paths) >= MOST:
        _paths.clear()
    _paths[signature] = path


def forget() -> None:
    """As if the process had made none."""
    _paths.clear()
