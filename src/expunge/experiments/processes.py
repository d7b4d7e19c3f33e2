"""Start several processes of one command that share the work of a folder, show what they say, and end them together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

from expunge.runtime.exits import uninterrupted

STARTING = "\u25b6 "  # before what a worker is about to do, for the process that shows it


def in_processes(command: Sequence[str], jobs: int, say: Callable[[str], None], starting: Callable[[str], None] | None) -> int:
    """Run a command of Python's in several processes, and return how many of them broke.

    The process id of this one is its last argument. With `starting` all they print goes to `say` and `starting`, else straight to standard
    error.
    """
    arguments = [sys.executable, *command, str(os.getpid()), *([] if starting is None else [STARTING])]
    errors = None if starting is None else subprocess.PIPE
    workers: list[subprocess.Popen[str]] = []
    listeners: list[Thread] = []
    try:
        with deaf_to_ctrl_c():
            for _ in range(jobs):
                workers.append(subprocess.Popen(arguments, env=same_imports(), stderr=errors, text=True))
        for worker in workers:
            if starting is not None:
                listeners.append(Thread(target=_listen, args=(worker, say, starting)))
                listeners[-1].start()
        codes = [worker.wait() for worker in workers]
    except BaseException:
        with uninterrupted():  # a second Ctrl-C must not leave some of them running
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
        raise
    finally:
        for listener in listeners:
            listener.join()
    for code in codes:
        if code < 0:  # a process that ends by itself has said why
            say(f"a process was ended by {signal.Signals(-code).name}; the same command does what is left")
    return sum(code != 0 for code in codes)


def _listen(worker: subprocess.Popen[str], say: Callable[[str], None], starting: Callable[[str], None]) -> None:
    assert worker.stderr is not None
    with worker.stderr as lines:
        for line in lines:
            text = line.rstrip("\n")
            starting(text.removeprefix(STARTING)) if text.startswith(STARTING) else say(text)


def same_imports() -> dict[str, str]:
    """The environment of a process that finds modules where this one does, such as those of methods of one's own."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which would end each with a traceback: they are ended by the one that started them.

    That one gets it, when all are started. The mask is what they inherit; it keeps the signal from this thread alone. Windows has none.
    """
    with uninterrupted():
        if not hasattr(signal, "pthread_sigmask"):
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
