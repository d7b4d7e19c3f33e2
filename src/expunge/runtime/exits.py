"""End a command with an exit code, and one line for what went wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from expunge.errors import ExpungeError

REFUSED, FAILED, STOPPED, UNREAD = 2, 1, 130, 141  # the last two as of a program that SIGINT or SIGPIPE ended


def ended(command: Callable[[], int | None], name: str = "expunge") -> int:
    """Run a command and return its exit code. A user's mistake, Ctrl-C or an OSError is one line on standard error, not a traceback.

    Characters that the terminal's encoding does not have are printed as question marks; where a stream is closed nothing is.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = command() or 0
        sys.stdout.flush()  # a failure here can still be reported; at the interpreter's end it cannot
        return code
    except KeyboardInterrupt:
        exec("")  # where one has passed through an `exec`, as of a dataclass, CPython would end by the signal, unless another goes well
        return _print_error(f"{name}: stopped", STOPPED)
    except ExpungeError as error:
        return _print_error(f"{name}: {error}", REFUSED)
    except SystemExit:  # after --help, which may be long
        _discard_output()
        raise
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        _discard_output()
        return UNREAD
    except OSError as error:
        _discard_output()
        return _print_error(f"{name}: {described(error)}", FAILED)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C within is raised at the end: an import that it cuts short may swallow it, and a process being started outlive us."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield  # where signals cannot be set, or Ctrl-C is ignored anyway
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt


def described(error: OSError) -> str:
    """The file, where there is one, and what the system says."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"


def on_one_line(text: str) -> str:
    """With line breaks, escape sequences of terminals and the like, which names of files may hold, written as in Python."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _print_error(line: str, code: int) -> int:
    with suppress(OSError):
        print(on_one_line(line), file=sys.stderr, flush=True)
    return code


def _open_closed_streams() -> None:
    """Python has None for a stream that was closed at the start (`>&-`), and the next file would get its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def _discard_output() -> None:
    """What is still to be written, if that cannot be: the interpreter would try once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
