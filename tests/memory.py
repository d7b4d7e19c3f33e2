"""How much memory a call takes at most, where the system tells: on Linux."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MIB = 2**20
ATTEMPTS = 3


def within(limit: int, call: Callable[[], object]) -> bool:
    """Whether the process grows by less than so many bytes while the call runs; always where that cannot be known.

    Pages of libraries that the system took back meanwhile count as well, once: what is too much is tried again.
    """
    return any(_growth(call) < limit for _ in range(ATTEMPTS))


def _growth(call: Callable[[], object]) -> int:
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        call()
        return 0
    reset.write_text("5")
    before = _peak()
    call()
    return _peak() - before


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
