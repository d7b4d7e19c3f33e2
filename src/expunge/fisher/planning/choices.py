"""Choose the closed forms that may fit, from forward passes of one sample and of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from expunge.fisher.planning.definition import NOISE, PROBE, tolerance
from expunge.fisher.planning.interception import Interception
from expunge.fisher.planning.layouts import Layout, infer
from expunge.fisher.planning.orders import Rows, fitting
from expunge.fisher.samples import MASKED, sizes_of, unmasked


def possible_layouts(fewer: Interception, more: Interception) -> dict[str, list[Layout]]:
    """The layouts to try for each parameter that might have a closed form."""
    choices = {}
    for name, shapes in more.shapes.items():
        before = fewer.shapes.get(name, [])
        if name in more.outside or name in more.notes.chosen or more.uses[name] > (1 if name in more.alone else len(shapes)):
            continue
        if len(before) != len(shapes) or (None in shapes and len(shapes) > 1):  # a lifted parameter is squared by itself
            continue
        layouts = [_of_use(old, new) for old, new in zip(before, shapes, strict=True)]
        if len(layouts) == 1:
            choices[name] = layouts[0]
        elif all(len(uses) == 1 for uses in layouts):  # of several orders the check might not show the right one of a use that is faint
            first, *others = (uses[0] for uses in layouts)
            choices[name] = [replace(first, others=tuple(others))]
    if fewer.derived is not None and more.derived is not None:
        for name, rows in more.derived.rows.items():
            fewer_rows = fewer.derived.rows.get(name)
            elsewhere = more.uses[name] or name in more.outside or name in more.notes.chosen
            if rows is not None and fewer_rows is not None and not elsewhere:
                choices[name] = [replace(layout, derived=True) for layout in infer((fewer_rows,), (rows,), PROBE) if layout.frames]
    return {name: layouts for name, layouts in choices.items() if layouts}


def _of_use(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> list[Layout]:
    return [Layout()] if before is None or after is None else infer(before, after, PROBE)


def in_the_order_of_samples(choices: Mapping[str, list[Layout]], fewer: Interception, more: Interception) -> dict[str, list[Layout]]:
    """Of the layouts to try for each parameter those by which a sample has the rows that it has alone."""
    found = {name: fitting(layouts, fewer.met[name], more.met[name], PROBE) for name, layouts in choices.items()}
    own = iter(_own([rows for candidates in found.values() for _, needed in candidates for rows in needed]))
    return {name: [layout for layout, needed in candidates if all([next(own) for _ in needed])] for name, candidates in found.items()}


def _own(pairs: Sequence[Rows]) -> list[bool]:
    """Whether a sample that has these rows alone has the first of two samples' rows. Those of a near copy are near, too.

    The device is waited for once; twice, where entries may be masks.
    """
    compared = [pair for rows, alone in pairs for pair in ((rows[:1], alone), (rows[1:], rows[:1]))]
    sizes = sizes_of(compared)
    far = [place for place, (_, size) in enumerate(sizes) if not size < -MASKED]
    for place, pair in zip(far, sizes_of([unmasked(*compared[place]) for place in far]), strict=True):
        sizes[place] = pair
    found = []
    for (rows, _), (off, size), (apart, _) in zip(pairs, sizes[::2], sizes[1::2], strict=True):
        same = off <= NOISE.get(rows.dtype, NOISE[torch.float32]) * size
        found.append(same or (off < tolerance(rows) * size and 2 * off < apart))
    return found


def why_none(name: str, more: Interception, fewer: Interception) -> str:
    """Why a parameter has no closed form to try."""
    if name in more.notes.chosen:
        return "used on rows chosen by their content"
    if name in more.alone and more.uses[name] > 1:
        return "used by a convolution and again"
    if more.derived is not None and name in more.derived.rows:
        return "made into another weight" if more.derived.rows[name] is None else "used by itself and in tensors made of it"
    if name in more.outside:
        return "used in operations without closed form"
    if more.uses[name] != fewer.uses[name]:
        return "one sample and two use it differently"
    if None in more.shapes.get(name, []) and len(more.shapes[name]) > 1:
        return "used by itself and in other operations"
    if len(more.shapes.get(name, [])) > 1:
        return "used again, on rows that may be in several orders"
    return "samples not along one dimension"
