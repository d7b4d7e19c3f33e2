"""Show the progress of long work: a bar on a terminal, a count in a notebook; elsewhere nothing, or one line at the end if enabled."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Sized
from typing import TypeVar

from expunge.runtime.display import counted
from expunge.validate import check_flag

Item = TypeVar("Item")


def is_shown(progress: bool | None) -> bool:
    """The caller's choice; None: shown where standard error is a terminal or a notebook runs."""
    if progress is not None:
        check_flag("progress", progress)
        return bool(progress)
    return _on_terminal() or _in_notebook()


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None under pythonw, which has no terminal


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; IPython in a terminal has another shell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else getattr(ipython, "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def announce(text: str, enabled: bool) -> None:
    """Say on a line of its own what begins now."""
    if enabled:
        print(text, file=sys.stderr, flush=True)


def track(iterable: Iterable[Item], description: str, total: int | None = None, enabled: bool = False) -> Generator[Item, None, None]:
    """The items of `iterable`, with their progress on standard error when `enabled`."""
    if not enabled:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if _on_terminal():
        yield from _drawn(iterable, description, total)
    elif _in_notebook():
        yield from _counted(iterable, description, total)
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
    print(f"{description}: {counted(count, 'step')}, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
