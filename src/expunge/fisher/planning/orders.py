"""Tell by the values of a forward pass in which order an operation's rows are: those of one sample are the same beside another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expunge.fisher.planning.layouts import Layout


def fitting(
    layouts: list[Layout], alone: Sequence[Tensor], together: Sequence[Tensor], samples: int, alike: Callable[[Tensor, Tensor], bool]
) -> list[Layout]:
    """Of several layouts, or of one of several uses, those by which the first of these samples has the rows that it has alone.

    `alone`, `together`: what the parameter's uses gave; of tensors made of it, what the operations gave where these met the data. All
    layouts, where that is not known.
    """
    uses = len(together) if layouts[0].derived else 1 + len(layouts[0].others)
    if (len(layouts) == 1 and uses == 1) or not len(alone) == len(together) == uses:
        return layouts

    def fits(layout: Layout | None, one: Tensor, more: Tensor) -> bool:
        if layout is None or layout.frames == 0 or not (more.is_floating_point() or more.is_complex()):
            return True
        one, more = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (one, more))
        if not layout.fits(tuple(more.shape), samples):
            return False
        first, single = layout.rows(more, samples)[:1], layout.rows(one, 1)
        return first.shape != single.shape or alike(first, single)  # alone a sample may be padded to another length

    def of_use(layout: Layout, number: int) -> Layout | None:
        return layout if layout.derived else layout.of_use(number)

    pairs = list(zip(alone, together, strict=True))
    return [layout for layout in layouts if all(fits(of_use(layout, use), *pair) for use, pair in enumerate(pairs))]
