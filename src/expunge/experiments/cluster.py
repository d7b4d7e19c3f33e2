"""Run calls of a function as tasks of a Ray cluster, again elsewhere when a process or a node dies."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from expunge.errors import InputError

RETRIES = 3  # of a task whose process or node died
REACHED = 10.0  # seconds for a cluster to take a connection: Ray itself tries for many minutes, without a word
NEEDED = "'ray' must be installed: pip install 'expunge[ray]'"
Do = Callable[..., tuple[int, list[str]]]  # how many broke, and the lines that say what was done
RunAll = Callable[[Do, Sequence[Sequence[Any]], Callable[[str], None]], int]


@contextmanager
def cluster(device: str) -> Iterator[RunAll]:
    """A function that runs calls, each on one CPU or one GPU, waits for all, and returns how many broke.

    The cluster is that of RAY_ADDRESS, that of this machine, or a new one here. Nothing may be lost with a task: it writes files whole or
    not at all, and locks end with their process.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError("on", NEEDED) from error
    own = not ray.is_initialized()
    if own:
        _join(ray)
    try:
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}}
        resources = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}

        def run_all(do: Do, calls: Sequence[Sequence[Any]], say: Callable[[str], None]) -> int:
            task = ray.remote(do).options(max_retries=RETRIES, runtime_env=environment, **resources)
            return _finish(ray, [task.remote(*call) for call in calls], say)

        yield run_all
    finally:
        if own:
            ray.shutdown()


def _join(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if place := re.fullmatch(r"([^/]+):(\d+)", address):
            socket.create_connection((place[1].strip("[]"), int(place[2])), REACHED).close()
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rule = f"a cluster must be at RAY_ADDRESS (host:6379), on this machine (ray start), or start here ({reason})"
        raise InputError("on", rule, f"RAY_ADDRESS={address}" if address else "no RAY_ADDRESS") from error


def _finish(ray: Any, waiting: list[Any], say: Callable[[str], None]) -> int:
    """Wait for tasks, saying what each did as it ends; the number that broke."""
    broken = 0
    while waiting:
        (ended, *_), waiting = ray.wait(waiting, num_returns=1)
        try:
            failed, lines = ray.get(ended)
        except ray.exceptions.RayError as error:
            failed, lines = 1, [f"BROKEN a task of the cluster: {str(error).strip().splitlines()[-1]}"]
        broken += failed
        for line in lines:
            say(line)
    return broken
