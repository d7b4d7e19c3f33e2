"""Let the processes of a torchrun agree before they share work: what differs or is missing is an error on all, within a time limit.

Everything goes through the store that the processes met at, not through collective operations: those hang where a process is missing,
and on nccl they need a GPU.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as distributed

from expunge.errors import ExpungeError, MismatchError

PATIENCE = 300.0  # seconds to wait for other processes
RECORD, UNIT = "\x1e", "\x1f"  # ASCII's separators
LINGER = 3.0  # seconds
MOMENT = 0.02  # seconds between two looks


class MissingProcessError(ExpungeError, RuntimeError):
    """Another process did not come within the time limit, failed, or holds its work without an end."""


def rank() -> int:
    """The number of this process; 0 where there is but one."""
    return distributed.get_rank() if _together() else 0


def world_size() -> int:
    """The number of processes of the default group; 1 where there is none."""
    return distributed.get_world_size() if _together() else 1


def here() -> str:
    """This process, for a message."""
    return f"rank {rank()} (process {os.getpid()} on {socket.gethostname()})"


def device_of_group(device: torch.device) -> torch.device:
    """Where tensors must be to be added up by the default group: nccl takes those of a GPU only, this process's."""
    backends = distributed.get_backend_config().split(",") if _together() else []
    if device.type != "cpu" or any(entry.startswith("cpu:") for entry in backends):
        return device
    return torch.device("cuda", torch.cuda.current_device())


def meeting() -> str:
    """A name for the next meeting: every process makes the same calls in the same order. Counted by the store, so anew in a new group."""
    with _answering():
        return f"expunge/meeting/{_store().add(f'expunge/meetings/{rank()}', 1)}"


def agree(describe: Callable[[], Mapping[str, str]], patience: float = PATIENCE) -> dict[str, str]:
    """What `describe` returns, after all processes have returned the same.

    Raises MismatchError on all of them, with the first entry that differs and the ranks that differ, and MissingProcessError where some do
    not come within `patience` seconds. Where `describe` raises on one process, it raises there, and MissingProcessError elsewhere.
    """
    if world_size() == 1:
        return dict(describe())
    place = meeting()
    try:
        own = dict(describe())
    except BaseException as error:
        with suppress(MissingProcessError):
            _set(f"{place}/{rank()}", _text({"": f"{type(error).__name__}: {error}"}))
        _linger(place)
        raise
    _set(f"{place}/{rank()}", _text(own))
    try:
        answers = _answers(place, patience)
        for number, answer in enumerate(answers):
            if "" in answer:  # no description, but an error
                raise MissingProcessError(f"rank {number} failed: {answer['']}")
        _compare(answers)
    except ExpungeError:
        _linger(place)
        raise
    return own


@contextmanager
def named_failures(where: str = "", place: str = "") -> Iterator[None]:
    """Within the context, what torch raises when another process has ended, or does not answer, is a MissingProcessError.

    Its text is what a process said by `tell_failure` with the same `place`, where one did.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, MissingProcessError) or not any(word in text for word in ("gloo", "Gloo", "NCCL", "TCPStore")):
            raise
        reason = ""
        with suppress(RuntimeError):
            reason = _store().get(f"{place}/failure").decode() if place and _store().check([f"{place}/failure"]) else ""
        if reason:
            raise MissingProcessError(f"{reason}; this process stops{where}") from error
        raise MissingProcessError(f"another process has ended{where}; this one cannot go on ({text.splitlines()[0]})") from error


def tell_failure(place: str, error: BaseException) -> None:
    """Let the others know why this process leaves the work they share; whoever left because another did says nothing."""
    if not isinstance(error, MissingProcessError):
        with suppress(RuntimeError):
            _store().set(f"{place}/failure", f"rank {rank()} failed: {type(error).__name__}: {error}")


def told_by_first(text: str | None, patience: float = PATIENCE) -> str:
    """The text of rank 0, on all processes."""
    if world_size() == 1:
        return str(text)
    key = meeting()
    if rank() == 0:
        _set(key, str(text))
    _wait([key], patience, [0])
    return _store().get(key).decode()


def is_last(place: str) -> bool:
    """Whether all other processes were here before, with the same word. Nobody waits."""
    try:
        return world_size() == 1 or _store().add(f"expunge/last/{place}", 1) == world_size()
    except RuntimeError:  # the process that serves the store was here, and has ended
        return True


def _text(described: Mapping[str, str]) -> str:
    """Entries between characters that no text has: what other processes send is split, and not parsed."""
    return RECORD.join(f"{name}{UNIT}{value.replace(RECORD, ' ')}" for name, value in described.items())


def _answers(place: str, patience: float) -> list[dict[str, str]]:
    keys = [f"{place}/{number}" for number in range(world_size())]
    _wait(keys, patience, range(world_size()))
    texts = [_store().get(key).decode() for key in keys]
    return [{name: value for name, _, value in (entry.partition(UNIT) for entry in text.split(RECORD) if entry)} for text in texts]


def _linger(place: str) -> None:
    """Before an error ends this process, let the others read: without torchrun, rank 0 serves the store, and takes it along."""
    with suppress(RuntimeError):
        _store().set(f"{place}/read/{rank()}", "")
        with suppress(MissingProcessError):
            _wait([f"{place}/read/{number}" for number in range(world_size())], LINGER if rank() == 0 else 0.0, range(world_size()))


def _wait(keys: list[str], patience: float, ranks: Any) -> None:
    """Until the store has all keys, each of which the process of a rank sets."""
    end, store = time.monotonic() + patience, _store()
    while missing := [number for number, key in zip(ranks, keys, strict=True) if not _has(store, key)]:
        if time.monotonic() > end:
            names = ", ".join(map(str, missing[:8]))
            plural = "ranks" if len(missing) > 1 else "rank"
            raise MissingProcessError(f"{plural} {names} of {world_size()} processes did not come within {patience:g} seconds")
        time.sleep(MOMENT)


def _set(key: str, text: str) -> None:
    with _answering():
        _store().set(key, text)


def _has(store: Any, key: str) -> bool:
    with _answering():
        return bool(store.check([key]))


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the process that serves the store has ended
        raise MissingProcessError(f"the store of the processes does not answer ({str(error).splitlines()[0]}): rank 0 has ended") from error


def _compare(described: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for own in described for name in own):
        values = [own.get(name, "none") for own in described]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            short = [value if len(value) <= 100 else f"{value[:100]}..." for value in (values[0], values[other])]
            raise MismatchError(f"all processes must have the same {name}; found {short[0]} on rank 0 and {short[1]} on rank {other}")


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()
