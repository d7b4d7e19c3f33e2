"""Draw a Fisher mask from stored sums: remain = total − forget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import nn

from expunge.data.batches import Data
from expunge.editing.patches import Patch
from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums
from expunge.methods import FisherMask
from expunge.methods.context import Run
from expunge.requests.grouping import Grouping
from expunge.requests.summing import Summing, folded
from expunge.requests.sums_building import drop
from expunge.requests.sums_store import KINDS, TOTAL, Store


@dataclass(frozen=True, repr=False)
class StoredMask:
    """A `FisherMask` that is given its sums."""

    method: FisherMask
    forget_sums: FisherSums = field(compare=False)
    remain_sums: FisherSums = field(compare=False)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        return self.method.by_sums(model, forget, remain, run, self.forget_sums, self.remain_sums)

    def __repr__(self) -> str:
        return repr(self.method)


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a request takes out of the sums, by group: `parts` are its samples', `lacking` those that the store lacked before; the total of
    all samples."""

    parts: Mapping[int, FisherSums]
    lacking: Mapping[int, FisherSums]
    total: FisherSums

    def mask(self, method: FisherMask) -> StoredMask:
        forget = folded(self.parts[group] for group in sorted(self.parts))
        return StoredMask(method, forget, self.total - forget)


def check_method(method: Any) -> FisherMask:
    if not isinstance(method, FisherMask) or method.kind not in KINDS:
        rule = f"stored sums are for fisher-mask with kind={' or '.join(KINDS)}, whose sums are over single samples"
        raise InputError("sums", rule, f"kind={method.kind}" if isinstance(method, FisherMask) else type(method).__name__)
    return method


def draw(store: Store, summing: Summing, rows: Sequence[int], dropped: Sequence[int]) -> Drawn:
    """The sums of a request for `rows`, out of a store that lacks the rows `dropped`, some of them.

    Passes are made over the rows alone; over a whole group none, if the store has it still.
    """
    grouping = store.grouping
    lacking_rows, lacking = grouping.split(dropped), summing.by_group(dropped, grouping)
    parts: dict[int, FisherSums] = {}
    others: list[int] = []
    for group, part in grouping.split(rows).items():
        whole = _group(store, group, lacking) if len(part) == int((grouping.group == group).sum()) else None
        if (sums := whole or (lacking[group] if part == lacking_rows.get(group) else None)) is not None:
            parts[group] = sums
        else:
            others += part
    parts |= summing.by_group(others, grouping)
    total = store.sums(TOTAL)
    assert total is not None
    taken = folded(lacking[group] for group in sorted(lacking)) if lacking else None
    return Drawn(parts, lacking, total.plus(taken, store.like(total)))


def samples_to_sum(store: Store, rows: Sequence[int], dropped: Sequence[int]) -> int:
    """Over how many samples `draw` makes passes."""
    lacking = store.grouping.split(dropped)
    total = len(dropped)
    for group, part in store.grouping.split(rows).items():
        whole = len(part) == int((store.grouping.group == group).sum()) and store.header.file(f"group-{group}") is not None
        total += 0 if whole or part == lacking.get(group) else len(part)
    return total


def draw_anew(summing: Summing, grouping: Grouping, rows: Sequence[int]) -> Drawn:
    """The same without a store, by a pass over everything: for a replay."""
    groups = (summing.by_group(grouping.rows(group), grouping)[group] for group in range(len(grouping.names)))
    return Drawn(summing.by_group(rows, grouping), {}, reduce(FisherSums.__add__, groups))


def take_out(store: Store, drawn: Drawn, dropped: Sequence[str]) -> None:
    """Take the samples of a request out of the store; `dropped` are the commitments of all requests so far."""
    groups = {group: _group(store, group, drawn.lacking) for group in drawn.parts}
    drop(store, drawn.parts, {group: sums for group, sums in groups.items() if sums is not None}, drawn.total, dropped)


def dropped_rows(store: Store, requests: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """The rows that the store lacks: those of the first requests, each given by its commitments and its ids."""
    dropped = store.header.dropped
    if dropped != tuple(root for root, _ in requests[: len(dropped)]):
        raise MismatchError(f"sums: {store.folder} lacks samples of other requests than those in the folder; build it anew")
    return [row for _, rows in requests[: len(dropped)] for row in rows]


def _group(store: Store, group: int, lacking: Mapping[int, FisherSums]) -> FisherSums | None:
    """The sums of all samples of a group, with those that were dropped."""
    rest = store.sums(f"group-{group}")
    return lacking.get(group) if rest is None else rest.plus(lacking.get(group), store.like(rest))
