"""Build a store of Fisher sums by one pass, shared by any number of processes; merge shards of it; take samples out again."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums
from expunge.fisher.chunks import Pass
from expunge.requests.grouping import Grouping
from expunge.requests.summing import Rest, Summing, folded
from expunge.requests.sums_store import LOCK, PASS, ROWS, STORE, TOTAL, Header, Store, locked, opened, read_header, read_store
from expunge.requests.weights import file_digest
from expunge.runtime import processes
from expunge.runtime.display import counted
from expunge.runtime.processes import PATIENCE, MissingProcessError
from expunge.storage.files import UNFINISHED, check_folder, write_bytes
from expunge.storage.folders import remove
from expunge.storage.folding import Sums
from expunge.storage.locks import try_lock
from expunge.storage.tensors import save_tensors, weights_digest

MOMENT = 0.05  # seconds between two looks for what another process stores
Say = Callable[[str], None]


def build(
    folder: str | os.PathLike[str],
    summing: Summing,
    grouping: Grouping,
    shard: tuple[int, int] = (1, 1),
    say: Say = lambda line: None,
    patience: float = PATIENCE,
    progress: bool | None = False,
) -> Header:
    """Sum the groups of a shard, of number `shard[0]` out of `shard[1]`, and store them; a build that was stopped goes on.

    All processes of a torchrun call it and share the pass, as in `fisher.by_group`, whose chunks these are. Rank 0 has the store's
    lock and writes it; where it has ended, another process does.
    """
    path, leads = Path(folder), processes.rank() == 0
    with ExitStack() as stack:

        def describe() -> dict[str, str]:
            check_folder("out", folder)
            headers.append(_described(summing, grouping))
            header = headers[0]
            sizes = f"{counted(header.samples, 'sample')}, kind {header.fisher}, batches of {header.batch_size}, {header.threads} threads"
            described = {"weights": header.weights, "data": str(header.data), "number of samples or settings": sizes}
            described["groups of the store"] = hashlib.sha256(header.content()).hexdigest()
            return described | {"shard": f"{shard[0]}/{shard[1]}", "folder `out`": os.path.abspath(path)}

        def enter() -> dict[str, str]:
            if leads:
                _check_ours(path)
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path, "out"))
                _enter(path, headers[0], grouping)
            return {}

        headers: list[Header] = []
        processes.agree(describe, patience)
        processes.agree(enter, patience)  # nothing is written before all agree
        there = read_header(path / STORE, "out")
        listed = [number for number in range(shard[0] - 1, len(grouping.names), shard[1]) if there.file(_name(number)) is None]
        told = processes.told_by_first(" ".join(map(str, listed if not there.complete else [])), patience)
        missing = [int(number) for number in told.split()]
        if not missing:
            return _ended(path, there) if leads else there
        keep = path / f"{PASS}{hashlib.sha256(told.encode()).hexdigest()[:12]}"
        rows = torch.isin(grouping.group, torch.tensor(missing)).nonzero().flatten().tolist()
        summed = summing.over(rows, grouping)
        with _naming_out(), summed.folded(keep, patience, progress if leads else False) as totals:
            names = {number: f"{grouping.names[number]}, group {number + 1} of {len(grouping.names)}" for number in missing}
            header = _store(path, summed, totals, names, say) if leads else _await(path, summed, totals, names, say, patience)
        if processes.is_last(keep):
            remove(keep)
        return header


def merge(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Header:
    """The groups of several shards in one folder, to the bit what one build would have stored; a merge that was stopped begins again."""
    check_folder("out", out)
    path = Path(out)
    _check_ours(path)
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(folder, "stores")) for folder in folders]
        bare = {replace(store.header, files={}).content() for store in stores}
        if len(bare) > 1 or not all(torch.equal(store.grouping.group, stores[0].grouping.group) for store in stores):
            raise MismatchError("stores: must be shards of one build, of the same weights, data, settings, threads and requests")
        path.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(path, "out"))
        if (path / STORE).exists() and {replace(read_store(path, "out").header, files={}).content()} != bare:
            raise MismatchError(f"out: {path} holds another store than that of these shards; choose another folder")
        files: dict[str, str] = {}
        for store in stores:
            for name, expected in store.header.files.items():
                if not name.startswith(f"{TOTAL}.") and name not in files:
                    write_bytes(path / name, (store.folder / name).read_bytes())
                    files[name] = expected
        return _totalled(path, _written(path, replace(stores[0].header, files=files)))


def drop(
    store: Store, parts: Mapping[int, FisherSums], groups: Mapping[int, FisherSums], total: FisherSums, dropped: Sequence[str]
) -> Header:
    """Take samples out of the store: `parts` are their sums by group, `groups` and `total` those of all samples, of the groups touched."""
    forget = folded(parts[group] for group in sorted(parts))
    changed = [(TOTAL, Rest.without(total, forget)), *((_name(group), Rest.without(groups[group], part)) for group, part in parts.items())]
    return _added(store.folder, replace(store.header, dropped=tuple(dropped), changes=store.header.changes + 1), changed)


def _described(summing: Summing, grouping: Grouping) -> Header:
    """The header of a store without sums."""
    return Header(
        fisher=summing.kind,
        weights=weights_digest(summing.model),
        data=summing.task.data,
        samples=grouping.samples,
        batch_size=summing.batch_size,
        threads=summing.threads,
        groups=grouping.names,
        files={},
    )


def _enter(path: Path, header: Header, grouping: Grouping) -> None:
    """Begin a store, or see that what is there is one of the same sums."""
    if (path / STORE).exists():
        store = read_store(path, "out")
        if replace(store.header, files={}, dropped=(), changes=0) != header or not torch.equal(store.grouping.group, grouping.group):
            raise MismatchError(f"{path} holds sums of other weights, data or settings; choose another folder")
    else:
        name = f"{ROWS}.0.safetensors"
        save_tensors(path / name, {"group": grouping.group}, {"kind": "expunge groups"})
        _written(path, replace(header, files={name: file_digest(path / name)}))


def _store(path: Path, summed: Pass, totals: Mapping[str, Sums], names: Mapping[int, str], say: Say) -> Header:
    """Write the groups that a pass has summed, one at a time, then the header that names all of them."""

    def groups() -> Iterable[tuple[str, Rest]]:
        for number, name in names.items():
            sums = summed.sums(totals[str(number)])
            say(f"{name}: {sums.count} samples")
            yield _name(number), Rest.whole(sums)

    return _totalled(path, _added(path, read_header(path / STORE, "out"), groups()))


def _await(path: Path, summed: Pass, totals: Mapping[str, Sums], names: Mapping[int, str], say: Say, patience: float) -> Header:
    """Until another process has written the groups; by this one, where the lock is free and they are not there."""
    end = time.monotonic() + patience
    while any((header := read_header(path / STORE, "out")).file(_name(number)) is None for number in names):
        with try_lock(path / LOCK) as ours:
            if ours and any(read_header(path / STORE, "out").file(_name(number)) is None for number in names):
                return _store(path, summed, totals, names, say)
        if time.monotonic() > end:
            raise MissingProcessError(f"out: another process has not stored the sums in {path} within {patience:g} seconds")
        time.sleep(MOMENT)
    return header


@contextmanager
def _naming_out() -> Iterator[None]:
    """An error about the folder of the pass, which is in that of the store, names the argument that is known."""
    try:
        yield
    except MismatchError as error:
        if not str(error).startswith("keep: "):
            raise
        rule = "a build that was stopped goes on with what it began with; else choose another folder"
        raise MismatchError(f"out: {str(error).removeprefix('keep: ')}; {rule}") from error


def _totalled(path: Path, header: Header) -> Header:
    """With the total, as soon as all groups are there."""
    names = [_name(number) for number in range(len(header.groups))]
    if header.complete or any(header.file(name) is None for name in names):
        return header
    store = Store(path, header, Grouping(header.groups, torch.empty(0)))
    total: FisherSums | None = None
    for name in names:
        rest = store.sums(name)
        assert rest is not None
        sums = rest.plus(None, store.like(rest))
        total = sums if total is None else total + sums
    assert total is not None
    return _added(path, header, [(TOTAL, Rest.whole(total))])


def _ended(path: Path, header: Header) -> Header:
    """What is left to do once no group is missing, after a kill; nobody is in a pass any more."""
    header = _totalled(path, header)
    for name in os.listdir(path) if header.complete else ():
        if name.startswith(PASS):
            remove(path / name)
    return header


def _added(path: Path, header: Header, sums: Iterable[tuple[str, Rest]]) -> Header:
    """Write sums under new names, then the header that names them, then remove what it no longer names: killed in between, one whole state
    is there. Groups of which nothing is left are dropped."""
    files = dict(header.files)
    for what, rest in sums:
        files.pop(header.file(what) or "", None)
        if not rest.count:
            continue
        name = f"{what}.{header.changes}.safetensors"
        low = rest.low if any(bool(part.any()) for part in rest.low.values()) else {}
        tensors = {f"high/{key}": value for key, value in rest.high.items()} | {f"low/{key}": value for key, value in low.items()}
        save_tensors(path / name, tensors, {"kind": "expunge sums", "count": str(rest.count)})
        files[name] = file_digest(path / name)
    changed = _written(path, replace(header, files=files))
    for name in header.files.keys() - files.keys():
        (path / name).unlink(missing_ok=True)
    return changed


def _written(path: Path, header: Header) -> Header:
    write_bytes(path / STORE, header.content())
    return header


def _check_ours(path: Path) -> None:
    if path.is_dir() and (strange := [name for name in sorted(os.listdir(path)) if not _is_ours(name)]):
        raise InputError("out", "must be a folder that is new, empty, or holds a store of sums", f"{path / strange[0]}")


def _is_ours(name: str) -> bool:
    stem = name.split(".")[0]
    return name in (STORE, LOCK) or name.startswith((UNFINISHED, PASS)) or stem in (ROWS, TOTAL) or stem.startswith("group-")


def _name(number: int) -> str:
    """Of a group, in the header."""
    return f"group-{number}"
