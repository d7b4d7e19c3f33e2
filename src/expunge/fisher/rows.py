"""Tell whether the rows that a pass over a batch counts to a sample are the sample's own, apart from what rounding does to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expunge.fisher.closed_forms.drawn import Part
from expunge.fisher.comparing import allowed

TIMES = 3.0  # the rounding that is measured may be so much larger in another pass
INPUTS = 0.1  # of what two sound computations may be apart: inputs are continuous, so they agree closely
SLOPES = 0.02  # flips are few or many: those of another pass may be none
LEAST = 1e-5  # of a row: without flips two sound computations in float32 are as far apart
WORST = 0.5  # of a row: beyond it no rounding explains a difference
ALONE = 0.1  # where a gradient stands alone, without an input that shows whose it is


def explained(
    batches: Sequence[Sequence[Part]], rounded: Sequence[Part], reference: Sequence[Part], names: set[str], flips: bool = True
) -> list[bool] | None:
    """Of each drawn sample, whether its parts are those of the reference up to rounding; None where the parts cannot be compared.

    `batches`: the parts that passes over their batches kept. `reference`: those of the same samples together, in float64.
    `rounded`: in the caller's precision. With d a sample's distance from the reference, and e the largest that the rounded ones have, both
    relative: d ≤ 3 e, or d is small: where there may be `flips` that the rounded ones do not have, up to 2 %, else 1e-5. Only the parts
    of these names are looked at; all of them must be there.
    """
    forms = {tuple(part[:2] for part in parts) for parts in (*batches, rounded, reference)}
    if len(forms) != 1:
        return None
    verdicts, seen = [], set[str]()
    for *own, again, exact in zip(*batches, rounded, reference, strict=True):
        used = {name for name in exact[:2] if name is not None}
        if not used & names:
            continue
        kept = exact._replace(inputs=torch.cat([part.inputs for part in own]), slopes=torch.cat([part.slopes for part in own]))
        if kept.inputs.shape != exact.inputs.shape or kept.slopes.shape != exact.slopes.shape:
            return None
        seen |= used
        verdicts.append(_own(kept, again, exact, flips))
    return torch.stack(verdicts).all(0).tolist() if names <= seen else None


def _own(kept: Part, rounded: Part, exact: Part, flips: bool) -> Tensor:
    """By sample."""
    least = SLOPES if flips else LEAST
    near = _near(kept.slopes, rounded.slopes, exact.slopes, 2, least, WORST)
    if exact.inputs.shape == exact.slopes.shape and exact.inputs is exact.slopes:
        return near & _near(kept.slopes, rounded.slopes, exact.slopes, 2, least, ALONE)
    if not exact.inputs.is_floating_point():
        return near & (kept.inputs == exact.inputs).flatten(1).all(1)
    loosest = allowed(kept.slopes)
    return near & _near(kept.inputs, rounded.inputs, exact.inputs, torch.inf, INPUTS * loosest, loosest)


def _near(kept: Tensor, rounded: Tensor, exact: Tensor, order: float, least: float, most: float) -> Tensor:
    size = _norms(exact, order)
    measured = (_norms(rounded - exact, order) / size).nan_to_num(0.0, 0.0).amax()
    return _norms(kept - exact, order) <= (TIMES * measured).clamp(least, most) * size


def _norms(tensor: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm(tensor.flatten(1).double(), order, dim=1)
