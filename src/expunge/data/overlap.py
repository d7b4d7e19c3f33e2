"""Raise where remain data contain samples of the forget set: training on them would undo the forgetting."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expunge.data.batches import Data
from expunge.data.fingerprints import Fingerprints, Unreadable, fingerprints
from expunge.data.objective import Batch, Objective
from expunge.data.records import CHUNK, PROBE, Part, Stream, labels_at, parts_of, same_rows
from expunge.data.stored import memory_of, stored_by
from expunge.errors import InputError, UncheckedWarning, naming
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import seeded
from expunge.runtime.progress import track

ROWS = "must not hold samples of the forget set; leave them out"
EQUAL = (
    "must not hold samples of the forget set; leave out those that equal one of them in inputs and label or, where they are records of "
    "their own, give both sets as Subsets of one dataset, which are told apart by their rows"
)
UNCHECKED = "remain: could not be compared with the forget data, so make sure that no sample is in both; Subsets of one dataset can be"


def check_disjoint(forget: Data, remain: Data, objective: Objective = Objective(), progress: bool = False) -> None:
    """No sample may be both to forget and to keep.

    Two samples are the same where they are one row of a dataset, or one place in memory, and have the same label. Loaders, samplers,
    subsets, concatenations and views that keep the labels are traced to their dataset; a transform does not make another sample of a row,
    another label does.
    Forget and remain data that have no dataset in common are compared by content: by what datasets store of their records, else by the
    samples, which are read for it. Samples that random transforms change cannot be compared: an `UncheckedWarning` says so.
    """
    if forget is remain:
        raise InputError("remain", "must not be the forget set", "the same object")
    with seeded(0, torch.device("cpu")):
        forget_parts, remain_parts = parts_of(forget, "forget", objective), parts_of(remain, "remain", objective)
        _check_rows(forget_parts, remain_parts, objective)
        comparison = _Comparison(objective, progress)
        verdicts = [verdict for part in remain_parts for verdict in comparison.by_content(part, forget_parts)]
    rows = sorted({row for verdict in verdicts for row in verdict.equal})
    if rows:
        raise InputError("remain", EQUAL, f"{len(rows)} equal, at index {', '.join(map(str, rows[:5]))}{', ...' if rows[5:] else ''}")
    if reason := next((verdict.unchecked for verdict in verdicts if verdict.unchecked), None):
        warnings.warn(f"{UNCHECKED} ({reason})", UncheckedWarning, stacklevel=level_of_caller())


class Verdict(NamedTuple):
    """The result of comparing contents: the indices of remain samples that equal a forget sample, or why nothing could be compared."""

    equal: list[int] = []
    unchecked: str | None = None


def _check_rows(forget_parts: Sequence[Part | Stream], remain_parts: Sequence[Part | Stream], objective: Objective) -> None:
    """Compare by rows of one dataset, and by addresses in memory."""
    shared: dict[int, set[int]] = {}
    for part in remain_parts:
        for other in forget_parts:
            if isinstance(part, Part) and isinstance(other, Part):
                places = _same_labels(part, other, *_same_records(part, other), objective)
                shared.setdefault(id(part.origin), set()).update(part.numbers[places].tolist())
    if count := sum(map(len, shared.values())):
        first = next(min(numbers) for numbers in shared.values() if numbers)
        raise InputError("remain", ROWS, f"{count} shared, the first at index {first}")


def _same_records(part: Part, other: Part) -> tuple[Tensor, Tensor]:
    """The places of records that are in both parts, in the first and in the other."""
    if part.origin is other.origin:
        return _equal(part.numbers, other.numbers)
    mine, theirs = memory_of(part.origin, part.numbers), memory_of(other.origin, other.numbers)
    if mine is None or theirs is None or mine.layout != theirs.layout:
        return (torch.empty(0, dtype=torch.int64),) * 2
    return _equal(mine.addresses, theirs.addresses)


def _equal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = second.sort()
    nearest = torch.searchsorted(ordered, first).clamp(max=len(second) - 1)
    places = (ordered[nearest] == first).nonzero().flatten()
    return places, order[nearest[places]]


def _same_labels(part: Part, other: Part, places: Tensor, others: Tensor, objective: Objective) -> Tensor:
    """The places of records that have the same label in both; those of one dataset do, and those whose labels cannot be read count too."""
    if part.data is other.data or not len(places):
        return places
    mine, theirs = labels_at(part.data, part.rows[places], objective), labels_at(other.data, other.rows[others], objective)
    return places if mine is None or theirs is None else places[same_rows(mine, theirs)]


def _decided_by_rows(part: Part | Stream, other: Part | Stream) -> bool:
    """Whether their rows decide which samples are the same: in one dataset, or in one storage."""
    if isinstance(part, Stream) or isinstance(other, Stream):
        return False
    if {*map(id, part.within)} & {*map(id, other.within)}:
        return True
    if part.rows_are_batches or other.rows_are_batches:
        return False
    mine, theirs = memory_of(part.origin, part.numbers[:1]), memory_of(other.origin, other.numbers[:1])
    same = mine is not None and theirs is not None and (mine.layout, mine.storage) == (theirs.layout, theirs.storage)
    return same and all(stored is not None and stored.tells_all for stored in (stored_by(part.origin), stored_by(other.origin)))


class _Comparison:
    """Compare contents. What is read of the forget data is read once, however many parts the remain data have."""

    def __init__(self, objective: Objective, progress: bool) -> None:
        self.objective, self.progress = objective, progress
        self._known: dict[tuple[Any, ...], Fingerprints] = {}
        self._steady: dict[Part | Stream, bool] = {}

    def by_content(self, part: Part | Stream, forget_parts: Sequence[Part | Stream]) -> Iterator[Verdict]:
        """Compare what rows do not decide: by the stored records, then by the samples where these do not decide."""
        others = [other for other in forget_parts if not _decided_by_rows(part, other)]
        alike = [other for other in others if isinstance(part, Part) and isinstance(other, Part) and _same_kind(part, other)]
        if alike and isinstance(part, Part):
            places, decided = self._stored_alike(part, alike)
            yield Verdict(_indices(part, places))
            if decided:
                others = [other for other in others if other not in alike]
        if others:
            yield self._by_samples(part, others)

    def _stored_alike(self, part: Part, others: Sequence[Part]) -> tuple[Tensor, bool]:
        """Where in the part records stand that equal one of the others in all that datasets store, whatever transforms make of it; and
        whether there can be no more."""
        mine = stored_by(part.origin)
        assert mine is not None  # they are of one kind
        try:
            known = self._fingerprints("stored", others, _stored)
            places, numbers, padded = _looked_up(map(mine.read, part.numbers.split(CHUNK)), known)
        except Unreadable:
            return torch.empty(0, dtype=torch.int64), False
        ends = torch.tensor([len(other.numbers) for other in others]).cumsum(0)
        owners, same = torch.bucketize(numbers, ends, right=True), [places[:0]]
        for number in owners.unique().tolist():
            here, other = owners == number, others[number]
            rows = numbers[here] - (ends[number] - len(other.numbers))
            same.append(_same_labels(part, other, places[here], rows, self.objective))
        return torch.cat(same), mine.tells_all and not padded

    def _by_samples(self, part: Part | Stream, others: Sequence[Part | Stream]) -> Verdict:
        """Compare the samples as they are read."""
        chance = "samples differ from reading to reading, as random transforms make them"
        try:
            with naming("remain"):
                unsteady = [] if _steady(part) else [part]
            with naming("forget"):
                unsteady += [other for other in others if not self._is_steady(other)]
                if any(isinstance(samples, Part) for samples in unsteady):
                    return Verdict(unchecked=chance)
                known = self._fingerprints("samples", others, lambda other: other.batches())
            with naming("remain"):
                places, _, padded = _looked_up(track(part.batches(), "comparing with the forget data", enabled=self.progress), known)
        except Unreadable:
            return Verdict(unchecked="samples that are not tensors with one row each")
        if padded:
            return Verdict(_indices(part, places), "texts are padded to other lengths")
        # A stream that differs may be shuffled or changed by chance; which of the two is unknown.
        return Verdict(_indices(part, places), chance if unsteady else None)

    def _is_steady(self, other: Part | Stream) -> bool:
        if other not in self._steady:
            self._steady[other] = _steady(other)
        return self._steady[other]

    def _fingerprints(self, of: str, others: Sequence[Any], read: Callable[[Any], Iterable[Batch]]) -> Fingerprints:
        key = (of, *others)
        if key not in self._known:
            self._known[key] = Fingerprints(batch for other in others for batch in read(other))
        return self._known[key]


def _same_kind(part: Part, other: Part) -> bool:
    if part.rows_are_batches or other.rows_are_batches:
        return False
    mine, theirs = stored_by(part.origin), stored_by(other.origin)
    return mine is not None and theirs is not None and mine.kind == theirs.kind


def _stored(part: Part) -> Iterator[Batch]:
    stored = stored_by(part.origin)
    assert stored is not None
    return map(stored.read, part.numbers.split(CHUNK))


def _looked_up(batches: Iterable[Batch], known: Fingerprints) -> tuple[Tensor, Tensor, bool]:
    """Which samples are among those known, which of them they are, and whether padding may hide others."""
    start, pairs, padded = 0, [(torch.empty(0, dtype=torch.int64),) * 2], False
    for batch in batches:
        matches = known.among(batch)
        pairs.append((matches.places + start, matches.numbers))
        start += matches.size
        padded = padded or matches.padded
    places, numbers = (torch.cat(column) for column in zip(*pairs, strict=True))
    return places, numbers, padded


def _steady(part: Part | Stream) -> bool:
    """Whether some samples are the same when they are read again."""

    def probe() -> list[int]:
        return fingerprints(next(iter(part.read(part.rows[:PROBE]) if isinstance(part, Part) else part.batches()))).tolist()

    return probe() == probe()


def _indices(part: Part | Stream, places: Tensor) -> list[int]:
    """The indices of samples of a part in the whole data."""
    return (part.place[places] if isinstance(part, Part) and not part.rows_are_batches else places).tolist()
