"""Build a store of Fisher sums, group by group; merge shards of it; take samples out again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from expunge.data.digest import data_digest
from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums
from expunge.requests.grouping import Grouping
from expunge.requests.summing import Rest, Summing, blocks_of, folded
from expunge.requests.sums_store import LOCK, PARTIAL, ROWS, STORE, TOTAL, Header, Store, locked, read_store
from expunge.requests.weights import file_digest
from expunge.storage.files import UNFINISHED, check_folder, write_bytes
from expunge.storage.tensors import load_tensors, save_tensors, weights_digest

EVERY = 20.0  # seconds between two savings of a group that is being summed
Say = Callable[[str], None]


def build(
    folder: str | os.PathLike[str],
    summing: Summing,
    grouping: Grouping,
    shard: tuple[int, int] = (1, 1),
    say: Say = lambda line: None,
) -> Header:
    """Sum the groups of a shard, of number `shard[0]` out of `shard[1]`, and store them; a build that was stopped goes on."""
    check_folder("out", folder)
    path = Path(folder)
    header = Header(
        fisher=summing.kind,
        weights=weights_digest(summing.model),
        data=data_digest(summing.task.train),
        samples=grouping.samples,
        batch_size=summing.batch_size,
        threads=torch.get_num_threads(),
        groups=grouping.names,
        files={},
    )
    if path.is_dir() and (strange := [name for name in sorted(os.listdir(path)) if not _is_ours(name)]):
        raise InputError("out", "must be a folder that is new, empty, or holds a store of sums", f"{path / strange[0]}")
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, "out"):
        if (path / STORE).exists():
            store = read_store(path, "out")
            if replace(store.header, files={}, dropped=(), changes=0) != header or not torch.equal(store.grouping.group, grouping.group):
                raise MismatchError(f"{path} holds sums of other weights, data or settings; choose another folder")
            header = store.header
        else:
            name = f"{ROWS}.0.safetensors"
            save_tensors(path / name, {"group": grouping.group}, {"kind": "expunge groups"})
            header = _written(path, replace(header, files={name: file_digest(path / name)}))
        for group in range(shard[0] - 1, len(grouping.names), shard[1]):
            if header.file(f"group-{group}") is None and not header.complete:
                sums = _resumed(path, summing, grouping.rows(group), group)
                say(f"{grouping.names[group]}: {sums.count} samples, group {group + 1} of {len(grouping.names)}")
                header = _added(path, header, {f"group-{group}": Rest.whole(sums)})
        (path / PARTIAL).unlink(missing_ok=True)  # also one that a process left which was killed after its last group
        return _totalled(path, header)


def merge(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Header:
    """The groups of several shards in a new folder; to the bit what one build would have stored."""
    check_folder("out", out)
    path = Path(out)
    if path.is_dir() and any(path.iterdir()):
        raise InputError("out", "must be a folder that is new or empty", os.fspath(out))
    stores = [read_store(Path(folder), "stores") if (Path(folder) / STORE).is_file() else _refused(folder) for folder in folders]
    bare = {replace(store.header, files={}).content() for store in stores}
    if len(bare) > 1 or not all(torch.equal(store.grouping.group, stores[0].grouping.group) for store in stores):
        raise MismatchError("stores: must be shards of one build, of the same weights, data, settings, threads and requests")
    path.mkdir(parents=True, exist_ok=True)
    header = replace(stores[0].header, files={})
    with locked(path, "out"):
        files: dict[str, str] = {}
        for store in stores:
            for name, expected in store.header.files.items():
                if not name.startswith(f"{TOTAL}.") and name not in files:
                    write_bytes(path / name, (store.folder / name).read_bytes())
                    files[name] = expected
        return _totalled(path, _written(path, replace(header, files=files)))


def drop(
    store: Store, parts: Mapping[int, FisherSums], groups: Mapping[int, FisherSums], total: FisherSums, dropped: Sequence[str]
) -> Header:
    """Take samples out of the store: `parts` are their sums by group, `groups` and `total` those of all samples, of the groups touched."""
    forget = folded(parts[group] for group in sorted(parts))
    changed = {TOTAL: Rest.without(total, forget)} | {f"group-{group}": Rest.without(groups[group], part) for group, part in parts.items()}
    return _added(store.folder, replace(store.header, dropped=tuple(dropped), changes=store.header.changes + 1), changed)


def _resumed(path: Path, summing: Summing, rows: Sequence[int], group: int) -> FisherSums:
    """Sum the blocks of a group, from where an earlier process was stopped on."""
    blocks, done, sums = list(blocks_of(rows)), 0, None
    if (path / PARTIAL).exists():
        tensors, metadata = load_tensors(path / PARTIAL, "expunge partial sums")
        if metadata["group"] == str(group):
            done = int(metadata["blocks"])
            sums = FisherSums(tensors, int(metadata["count"]), summing.kind, metadata["weights"])
    saved = time.monotonic()
    for number in range(done, len(blocks)):
        block = summing.block(blocks[number])
        sums = block if sums is None else sums + block
        if number + 1 < len(blocks) and time.monotonic() - saved >= EVERY:
            metadata = {"kind": "expunge partial sums", "group": str(group), "blocks": str(number + 1)}
            save_tensors(path / PARTIAL, sums.sums, metadata | {"count": str(sums.count), "weights": sums.digest})
            saved = time.monotonic()
    assert sums is not None
    return sums


def _totalled(path: Path, header: Header) -> Header:
    """With the total, as soon as all groups are there."""
    names = [f"group-{group}" for group in range(len(header.groups))]
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
    return _added(path, header, {TOTAL: Rest.whole(total)})


def _added(path: Path, header: Header, sums: Mapping[str, Rest]) -> Header:
    """Write sums under new names, then the header that names them, then remove what it no longer names: killed in between, one whole state
    is there. Groups of which nothing is left are dropped."""
    files = {name: value for name, value in header.files.items() if name.split(".")[0] not in sums}
    for what, rest in sums.items():
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


def _is_ours(name: str) -> bool:
    stem = name.split(".")[0]
    return name in (STORE, PARTIAL, LOCK) or name.startswith(UNFINISHED) or stem in (ROWS, TOTAL) or stem.startswith("group-")


def _refused(folder: str | os.PathLike[str]) -> Store:
    raise InputError("stores", "must be folders that `expunge fisher build` wrote", os.fspath(folder))
