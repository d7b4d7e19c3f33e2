"""Choose the top share of scores that are sharded over processes, by a threshold that all of them find together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from expunge.errors import InputError
from expunge.runtime import processes
from expunge.storage.sharded import check_rows, form_digest, is_sharded, like, local

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def top(score: Mapping[str, Any], checked: Callable[[], list[str]], wanted_of: Callable[[int], int], by_layer: bool) -> dict[str, Any]:
    """`masks.select` of single weights, `wanted_of(n)` of n: the same weights as if one process had the whole score.

    The threshold is the k-th largest score, found byte by byte among all float64 numbers (their bits, read as integers in their order): 8
    rounds, in each of which processes add up how many of their scores have which byte. No score leaves its process. Of scores equal to
    the threshold the first count, by parameter and then by row: a process needs but the number of equal ones before its own.

    `checked` gives the names of the candidates. Where it raises on one process, or they or the numbers differ, that is an error on all.
    """
    names: list[str] = []
    wanted: list[int] = []

    def describe() -> dict[str, str]:
        names.extend(checked())
        for name in names:
            if not is_sharded(score[name]):
                raise InputError("score", "must be sharded in all of its tensors, or in none", name)
            check_rows(name, score[name])
        sizes = [math.prod(score[name].shape) for name in names]
        wanted.extend(map(wanted_of, sizes if by_layer else [sum(sizes)]))
        numbers = " ".join(map(str, wanted))
        return {"candidates": form_digest({name: score[name] for name in names}), "number of weights to choose": numbers}

    processes.agree(describe)
    with processes.collective(score[name] for name in names):
        return _top(score, names, wanted, by_layer)


def _top(score: Mapping[str, Any], names: Sequence[str], wanted: Sequence[int], by_layer: bool) -> dict[str, Any]:
    group = score[names[0]].device_mesh.get_group()
    keys = [_keys(local(score[name])) for name in names]
    broken = _added([local(score[name]).isnan().sum() for name in names], group)
    if bool(broken.any()):
        raise InputError("score", "must not be NaN", names[int(broken.nonzero()[0])])
    parts = [[number] for number in range(len(names))] if by_layer else [list(range(len(names)))]
    thresholds = _thresholds(keys, parts, wanted, group)
    masks: list[Tensor] = [torch.zeros_like(values, dtype=torch.bool) for values in keys]
    for part, count, threshold in zip(parts, wanted, thresholds, strict=True):
        above = int(_added([sum(((keys[number] > threshold).sum() for number in part), keys[0].new_zeros(()))], group))
        before = _equal_before([keys[number] for number in part], threshold, group)
        for number, offset in zip(part, before, strict=True):
            equal = keys[number] == threshold
            masks[number] = (keys[number] > threshold) | (equal & (equal.cumsum(0) + offset <= count - above)) if count else masks[number]
    return {name: like(score[name], mask.view(local(score[name]).shape)) for name, mask in zip(names, masks, strict=True)}


def _keys(values: Tensor) -> Tensor:
    """Whole numbers in the order of the values, flat; 0.0 and −0.0 are one."""
    bits = (values.detach().double() + 0.0).contiguous().view(torch.int64).reshape(-1)
    return torch.where(bits < 0, bits ^ HIGHEST, bits)


def _thresholds(keys: list[Tensor], parts: list[list[int]], wanted: Sequence[int], group: Any) -> list[int]:
    """For each part the largest key that at least so many of its keys reach: its eight bytes one after the other, from the highest on."""
    unsigned = [values ^ LOWEST for values in keys]  # in the order of unsigned numbers
    prefixes, missing = [0] * len(parts), list(wanted)
    for shift in range(56, -8, -8):
        above = (1 << (56 - shift)) - 1  # the bytes that are known
        counts = [
            sum((_bytes(unsigned[number], shift, above, prefix) for number in part), keys[0].new_zeros(256))
            for part, prefix in zip(parts, prefixes, strict=True)
        ]
        for place, row in enumerate(_added(counts, group).tolist()):
            byte = 255
            while byte and row[byte] < missing[place]:
                missing[place] -= row[byte]
                byte -= 1
            prefixes[place] = prefixes[place] << 8 | byte
    return [prefix - 2**63 if count else HIGHEST for prefix, count in zip(prefixes, wanted, strict=True)]


def _bytes(values: Tensor, shift: int, above: int, prefix: int) -> Tensor:
    """How many values have which byte at this place, of those whose higher bytes are the prefix."""
    same = values if shift == 56 else values[((values >> (shift + 8)) & above) == prefix]
    return torch.bincount((same >> shift) & 255, minlength=256)


def _equal_before(keys: list[Tensor], threshold: int, group: Any) -> list[int]:
    """By parameter, how many keys equal to the threshold come before this process's: those of earlier parameters and of earlier rows."""
    own = torch.stack([(values == threshold).sum() for values in keys])
    counts = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(counts, own, group=group)
    table, rank = torch.stack(counts), distributed.get_rank(group)
    earlier = table.sum(0).cumsum(0) - table.sum(0)
    return (earlier + table[:rank].sum(0)).tolist()


def _added(values: Sequence[Tensor], group: Any) -> Tensor:
    total = torch.stack([value.to(torch.int64) for value in values])
    distributed.all_reduce(total, group=group)
    return total
