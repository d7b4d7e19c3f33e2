"""Let the processes of a torchrun agree before they share work: what differs or is missing is an error on all, within a time limit.

Everything goes through the store that the processes met at, not through collective operations: those hang where a process is missing,
and on nccl they need a GPU.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from expunge.errors import ExpungeError, InputError, MismatchError
from expunge.runtime.callers import level_of_caller
from expunge.storage.documents import fingerprinted

PATIENCE = 300.0  # seconds to wait for other processes
RECORD, UNIT = "\x1e", "\x1f"  # ASCII's separators
LINGER = 3.0  # seconds
MOMENT = 0.02  # seconds between two looks
WORDS = ("gloo", "Gloo", "NCCL", "TCPStore", "pair closure")  # in what torch's backends raise; the last is gloo's, without its name


class MissingProcessError(ExpungeError, RuntimeError):
    """Another process did not come within the time limit, failed, or holds its work without an end."""


@contextmanager
def of_torchrun(patience: float = PATIENCE) -> Iterator[None]:
    """Within the context the processes that a torchrun started are one group, unless they are already; else nothing is changed.

    The group is gloo's, with GPUs too: the processes speak through its store alone. Each has a GPU of its own, where there are enough.
    """
    if not _started_by_torchrun() or _together():
        yield
        return
    own, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (own.isdecimal() and size.isdecimal() and int(own) < int(size)):
        raise InputError("RANK", "must be a whole number below WORLD_SIZE, as torchrun sets them", f"{own} of {size}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=patience))
    except (RuntimeError, ValueError) as error:
        told = f"the {size} processes of torchrun did not meet within {patience:g} seconds"
        raise MissingProcessError(f"{told} ({str(error).splitlines()[0]})") from error
    try:
        yield
    finally:
        distributed.destroy_process_group()  # else gloo's threads may outlive Python, and the process aborts after its work


def _started_by_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def rank() -> int:
    """The number of this process; 0 where there is but one."""
    return distributed.get_rank() if _together() else 0


def world_size() -> int:
    """The number of processes of the default group; 1 where there is none."""
    return distributed.get_world_size() if _together() else 1


def is_alone() -> bool:
    """Whether this process does all of the work; warns, once, where torchrun has started several that form no group."""
    size = os.environ.get("WORLD_SIZE", "")
    if _started_by_torchrun() and not _together() and size.isdecimal() and int(size) > 1:
        _warn_of_others(size)
    return world_size() == 1


@functools.cache  # once in a process
def _warn_of_others(size: str) -> None:
    told = f"torchrun started {size} processes, but they form no process group: each of them does all of the work by itself"
    warnings.warn(f"{told}; call torch.distributed.init_process_group() before", UserWarning, stacklevel=level_of_caller())


def here() -> str:
    """This process, for a message."""
    return f"rank {rank()} (process {os.getpid()} on {socket.gethostname()})"


def device_of_group(device: torch.device) -> torch.device:
    """Where tensors must be to be added up by the default group: nccl takes those of a GPU only, this process's."""
    backends = distributed.get_backend_config().split(",") if _together() else []
    if device.type != "cpu" or any(entry.startswith("cpu:") for entry in backends):
        return device
    return torch.device("cuda", torch.cuda.current_device())


def check_takes(device: torch.device, what: str) -> None:
    """Raise InputError where the default group's backend cannot gather tensors on this device: gloo ends the process by SIGSEGV there."""
    if device.type == "cuda" and _together() and "cuda:gloo" in distributed.get_backend_config():
        raise InputError("backend", f'must be nccl for {what} on GPUs: init_process_group("nccl")', "gloo")


def meeting(patience: float = PATIENCE) -> str:
    """A name for the next meeting: every process makes the same calls in the same order. Counted by the store, so anew in a new group."""
    return f"expunge/meeting/{_asked(lambda store: store.add(f'expunge/meetings/{rank()}', 1), patience)}"


def agree(describe: Callable[[], Mapping[str, str]], patience: float = PATIENCE) -> dict[str, str]:
    """What `describe` returns, after all processes have returned the same.

    Raises MismatchError on all of them, with the first entry that differs and the ranks that differ, and MissingProcessError where some do
    not come within `patience` seconds. Where `describe` raises on one process, it raises there, and MissingProcessError elsewhere.
    """
    if world_size() == 1:
        return dict(describe())
    place = meeting(patience)
    try:
        own = dict(describe())
    except BaseException as error:
        _leave(place, error)
        _linger(place)
        raise
    _set(f"{place}/{rank()}", _text(own), patience)
    try:
        answers = _answers(place, patience)
        for number, answer in enumerate(answers):
            if "" in answer:  # no description, but an error
                raise MissingProcessError(f"rank {number} failed: {answer['']}")
        _compare(answers)
    except ExpungeError as error:
        if isinstance(error, MissingProcessError):  # whoever comes later must not take this process for one that goes on
            _leave(place, error)
        _linger(place)
        raise
    _linger(place)
    return own


def _leave(place: str, error: BaseException) -> None:
    """An error instead of a description."""
    with suppress(MissingProcessError):
        _set(f"{place}/{rank()}", _text({"": f"{type(error).__name__}: {error}"}), LINGER)


@contextmanager
def collective(tensors: Iterable[Any], patience: float = PATIENCE) -> Iterator[None]:
    """Within the context, processes exchange such sharded tensors: `limited`, with `named_failures`."""
    with limited([tensor.device_mesh for tensor in tensors], patience), named_failures():
        yield


@contextmanager
def limited(meshes: Iterable[Any], patience: float) -> Iterator[None]:
    """Within the context, no process waits longer than this for another in gloo's operations on these meshes, or on all processes; torch's
    own limit is 30 minutes. nccl ends the process at its limit, so it keeps the one that it was given."""
    groups = [group for mesh in dict.fromkeys(meshes) for group in mesh.get_all_groups()]
    groups += [distributed.group.WORLD] if _together() else []
    backends = [group._get_backend(torch.device("cpu")) for group in groups if "cpu:gloo" in distributed.get_backend_config(group)]
    before = [backend.options._timeout for backend in backends]
    try:
        for backend in backends:
            backend._set_default_timeout(min(timedelta(seconds=patience), backend.options._timeout))
        yield
    finally:
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


@contextmanager
def named_failures(where: str = "", place: str = "") -> Iterator[None]:
    """Within the context, what torch raises when another process has ended, or does not answer, is a MissingProcessError.

    Its text is what a process said by `tell_failure` with the same `place`, where one did.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, MissingProcessError) or not (_from_torch(error) or any(word in text for word in WORDS)):
            raise
        reason = ""
        with suppress(RuntimeError):
            reason = _get(f"{place}/failure", LINGER) if place and _has(f"{place}/failure", LINGER) else ""
        if reason:
            raise MissingProcessError(f"{reason}; this process stops{where}") from error
        ended = "does not answer" if "Timed out" in text or "timeout" in text else "has ended"
        raise MissingProcessError(f"another process {ended}{where}; this one cannot go on ({text.splitlines()[0]})") from error


def _from_torch(error: RuntimeError) -> bool:
    return distributed.is_available() and isinstance(error, distributed.DistError)


def tell_failure(place: str, error: BaseException) -> None:
    """Let the others know why this process leaves the work they share; whoever left because another did says nothing."""
    if not isinstance(error, MissingProcessError):
        with suppress(RuntimeError):
            _set(f"{place}/failure", f"rank {rank()} failed: {type(error).__name__}: {error}", LINGER)


def told_by_first(text: str | None, patience: float = PATIENCE) -> str:
    """The text of rank 0, on all processes."""
    if world_size() == 1:
        return str(text)
    key = meeting(patience)
    if rank() == 0:
        _set(key, str(text), patience)
    _wait([key], patience, [0])
    text = _get(key, patience)
    _linger(key)
    return text


def is_last(folder: Path) -> bool:
    """Whether all other processes have left a folder that they share, by this call: of two that leave at once, both may be told so. Nobody
    waits; where one was killed, nobody is last.

    Told by files, since the store ends with the process that serves it, while others may still be reading.
    """
    if world_size() > 1:
        (folder / f"left-{rank()}").touch()
    return world_size() == 1 or all((folder / f"left-{number}").exists() for number in range(world_size()))


def _text(described: Mapping[str, str]) -> str:
    """Entries between characters that no text has: what other processes send is split, and not parsed."""
    return RECORD.join(f"{name}{UNIT}{value.replace(RECORD, ' ')}" for name, value in described.items())


def _answers(place: str, patience: float) -> list[dict[str, str]]:
    keys = [f"{place}/{number}" for number in range(world_size())]
    _wait(keys, patience, range(world_size()))
    texts = [_get(key, patience) for key in keys]
    return [{name: value for name, _, value in (entry.partition(UNIT) for entry in text.split(RECORD) if entry)} for text in texts]


def _linger(place: str) -> None:
    """Let the others read before this process may end: without torchrun, rank 0 serves the store, and takes it along."""
    with suppress(RuntimeError):
        _set(f"{place}/read/{rank()}", "", LINGER)
        if rank() == 0:
            _wait([f"{place}/read/{number}" for number in range(world_size())], LINGER, range(world_size()))


def _wait(keys: list[str], patience: float, ranks: Any) -> None:
    """Until the store has all keys, each of which the process of a rank sets."""
    end = time.monotonic() + patience
    while missing := [number for number, key in zip(ranks, keys, strict=True) if not _has(key, patience)]:
        if time.monotonic() > end:
            names = ", ".join(map(str, missing[:8]))
            plural = "ranks" if len(missing) > 1 else "rank"
            raise MissingProcessError(f"{plural} {names} of {world_size()} processes did not come within {patience:g} seconds")
        time.sleep(MOMENT)


def _set(key: str, text: str, patience: float) -> None:
    _asked(lambda store: store.set(key, text), patience)


def _get(key: str, patience: float) -> str:
    return str(_asked(lambda store: store.get(key), patience).decode())


def _has(key: str, patience: float) -> bool:
    return bool(_asked(lambda store: store.check([key]), patience))


def _asked(ask: Callable[[Any], Any], patience: float) -> Any:
    """What the store answers. A thread asks: torch waits without a limit where the process that serves the store is stopped."""
    store, answers, errors = _store(), list[Any](), list[RuntimeError]()

    def wait() -> None:
        try:
            answers.append(ask(store))
        except RuntimeError as error:
            errors.append(error)

    asking = threading.Thread(target=wait, daemon=True)
    asking.start()
    asking.join(patience)
    if errors:  # the process that serves the store has ended
        told = f"the store of the processes does not answer ({str(errors[0]).splitlines()[0]}): rank 0 has ended"
        raise MissingProcessError(told) from errors[0]
    if not answers:
        raise MissingProcessError(
            f"the store of the processes did not answer within {patience:g} seconds: rank 0, which serves it, is stopped"
        )
    return answers[0]


def _compare(described: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for own in described for name in own):
        values = [own.get(name, "none") for own in described]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            first, second = _shortened(fingerprinted(values[0]), fingerprinted(values[other]))
            raise MismatchError(f"all processes must have the same {name}; found {first} on rank 0 and {second} on rank {other}")


def _shortened(first: str, second: str) -> list[str]:
    """Two values that differ, at most 100 characters of each: where these begin alike, from shortly before the difference on."""
    start = max(0, len(os.path.commonprefix([first, second])) - 20) if len(max(first, second, key=len)) > 100 else 0
    parts = [("..." if start else "") + value[start:] for value in (first, second)]
    return [part if len(part) <= 100 else f"{part[:100]}..." for part in parts]


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()
