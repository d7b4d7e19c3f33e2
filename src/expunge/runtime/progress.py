"""Progress of long work: a bar on a terminal, one line at the end elsewhere, nothing unless asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Sized
from typing import TypeVar

Item = TypeVar("Item")


def track(iterable: Iterable[Item], description: str, total: int | None = None, enabled: bool = False) -> Generator[Item, None, None]:
    """The items of `iterable`, with their progress on standard error when `enabled`."""
    if not enabled:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if sys.stderr.isatty():
        yield from _drawn(iterable, description, total)
    else:
        yield from _summed_up(iterable, description)


def _drawn(iterable: Iterable[Item], description: str, total: int | None) -> Generator[Item, None, None]:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield from _counted(iterable, description, total)
        return
    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task(description, total=total)
        for item in iterable:
            yield item
            bars.advance(task)


def _counted(iterable: Iterable[Item], description: str, total: int | None) -> Generator[Item, None, None]:
    goal = "" if total is None else f"/{total}"
    shown = 0.0
    count = 0
    try:
        for count, item in enumerate(iterable, start=1):  # noqa: B007 (count is printed at the end)
            yield item
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                print(f"\r{description}: {count}{goal}", end="", file=sys.stderr, flush=True)
    finally:
        print(f"\r{description}: {count}{goal}", file=sys.stderr, flush=True)


def _summed_up(iterable: Iterable[Item], description: str) -> Generator[Item, None, None]:
    started = time.monotonic()
    count = 0
    for count, item in enumerate(iterable, start=1):  # noqa: B007 (count is printed at the end)
        yield item
    print(f"{description}: {count} steps, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
