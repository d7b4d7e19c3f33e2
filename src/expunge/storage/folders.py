"""Replace a folder of results whole: reserved before the work, written beside, swapped at the end.

A command holds the folder's lock from its start, so two do not write one folder. It writes into a new folder, `.NAME.expunge-new`, and
swaps that for an earlier result of the same command; whatever else is in the folder is never removed, but refused before the work. A
folder that cannot be renamed (a mount point, the working directory, one whose parent cannot be written) is written into instead, file by
file out of the finished new folder, result.json last; what a kill leaves undone there the next command does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.storage.documents import read_json
from expunge.storage.files import check_folder
from expunge.storage.locks import try_lock_and_remove

RESULT = "result.json"
INSIDE = {".expunge-lock", ".expunge-work"}  # are in a folder that cannot have them beside, such as a mount point
LITTER = {".DS_Store", "Thumbs.db", "desktop.ini"}  # what file managers leave wherever they look


def signature(command: str, files: Iterable[str]) -> dict[str, Any]:
    """What result.json tells of its folder: the command, and the files it wrote. Those may be replaced by its next run.

    A name that ends with a slash is a folder, which has a result.json of its own.
    """
    return {"command": command, "files": sorted({RESULT, *files})}


@dataclass(frozen=True)
class Reserved:
    """A folder that this process alone writes a command's results into."""

    argument: str
    shown: Path
    folder: Path
    """The same, without links: those stay, and lead to the new result."""
    command: str
    movable: bool
    beside: bool
    """Whether the lock is in the parent: for all processes alike, wherever they work."""

    @property
    def new(self) -> Path:
        return self._own("new", self.movable)

    @property
    def earlier(self) -> Path:
        """Where an earlier result is while the new one takes its place."""
        return self._own("earlier", self.movable)

    @property
    def finished(self) -> Path:
        """What `new` is called when it is whole and goes file by file into a folder that cannot be renamed."""
        return self._own("finished", self.movable)

    @property
    def work(self) -> Path:
        """Private, for what is not finished: it outlives a kill, and is never among the results."""
        return self._own("work", self.beside)

    @property
    def lock(self) -> Path:
        return self._own("lock", self.beside)

    def _own(self, name: str, beside: bool) -> Path:
        if beside:
            return self.folder.with_name(f".{self.folder.name}.expunge-{name}")
        return self.folder / f".expunge-{name}"

    def save(self, write: Callable[[Path], object]) -> Path:
        """Have `write` fill a new folder, and put it in the place of the earlier result; all of it or nothing.

        An error of the system names the file as it would have been called.
        """
        try:
            self.new.mkdir()
            write(self.new)
            self.check()  # again: the work may have taken hours
            if self.movable:
                self._swap()
            else:
                os.replace(self.new, self.finished)
                self._move_in()
        except OSError as error:
            if error.errno is None or error.filename is None:
                raise
            file = Path(os.path.realpath(os.fsdecode(error.filename)))
            if not file.is_relative_to(self.new):
                raise
            raise OSError(error.errno, error.strerror, os.fspath(self.shown / file.relative_to(self.new))) from error
        return self.shown

    def _swap(self) -> None:
        try:
            if self.folder.is_dir():
                shutil.copymode(self.folder, self.new)
                os.replace(self.folder, self.earlier)
            os.replace(self.new, self.folder)
        except BaseException:
            if self.earlier.exists() and not self.folder.exists():
                os.replace(self.earlier, self.folder)
            raise

    def _move_in(self) -> None:
        """From `finished` into the folder; begun again after a kill it ends the same."""
        replaced, added = listed(self.folder, self.command), listed(self.finished, self.command)
        for name in added - {RESULT}:
            if (self.finished / name).exists():  # not moved before the kill
                if name.endswith("/"):
                    remove(self.folder / name)  # a folder cannot be renamed onto another
                os.replace(self.finished / name, self.folder / name)
        for name in replaced - added:
            if name.endswith("/"):
                remove(self.folder / name)
            else:
                (self.folder / name).unlink(missing_ok=True)
        os.replace(self.finished / RESULT, self.folder / RESULT)

    def recover(self) -> None:
        """End what was begun here, by us or by a process that was killed: while we hold the lock nobody else is at it."""
        if (self.finished / RESULT).exists():
            self._move_in()
        if self.earlier.is_dir() and not self.folder.exists():
            os.replace(self.earlier, self.folder)
        for left in (self.new, self.earlier, self.finished):
            remove(left)

    def check(self) -> None:
        """Raise InputError for a folder that holds anything but an earlier result of the same command."""
        for path in (self.new, self.earlier, self.finished, self.work):
            if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink()):
                raise InputError(self.argument, f"needs the name {path} for a folder of its own: move what is there", os.fspath(self.shown))
        own = {path.name for path in (self.new, self.lock, self.finished, self.work)}
        if (stranger := next(strangers(self.folder, self.command, own), None)) is not None:
            rule = f"must be a folder that is new, empty, or holds an earlier result of the same kind ({self.command}) and nothing else"
            raise InputError(self.argument, f"{rule}: choose another, or move what is there", os.fspath(self.shown / stranger))


@contextmanager
def reserved(argument: str, out: str | os.PathLike[str], command: str) -> Iterator[Reserved]:
    """Check a folder before the work, and keep other processes from writing it meanwhile; the lock ends with the process."""
    place = _place(argument, out, command)
    place.lock.parent.mkdir(parents=True, exist_ok=True)
    with try_lock_and_remove(place.lock) as free:
        if not free:
            raise InputError(argument, "must not be in use: another command is writing there", os.fspath(out))
        if place.beside:  # another working directory may have made the other choice
            replace(place, movable=not place.movable).recover()
        place.recover()
        place.check()
        try:
            yield place
        finally:
            place.recover()


def check_place(argument: str, out: str | os.PathLike[str], command: str) -> None:
    """What `reserved` refuses but a folder in use, without writing anything: for a dry run."""
    _place(argument, out, command).check()


def _place(argument: str, out: str | os.PathLike[str], command: str) -> Reserved:
    check_folder(argument, out)
    folder = Path(os.path.realpath(out))
    return Reserved(argument, Path(out), folder, command, is_movable(folder), _is_replaceable(folder))


def is_movable(folder: Path) -> bool:
    """Whether the folder can be renamed, and whoever works in it would not be left in one that is removed."""
    return _is_replaceable(folder) and not Path.cwd().is_relative_to(folder)


def _is_replaceable(folder: Path) -> bool:
    if os.path.ismount(folder):
        return False
    return not folder.exists() or os.access(folder.parent, os.W_OK | os.X_OK)


def strangers(folder: Path, command: str | None, own: Iterable[str] = ()) -> Iterator[str]:
    """Names in the folder that are in no result of the command; None: of any."""
    if not folder.exists():
        return
    known = {*listed(folder, command), *own, *LITTER}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if f"{entry.name}/" in known and entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{name}" for name in strangers(Path(entry.path), None))
        elif entry.name not in known or (entry.is_dir() and entry.name not in own):
            yield entry.name


def listed(folder: Path, command: str | None) -> set[str]:
    """The files that a command's result.json says it wrote; none where it is another's, or not ours at all."""
    try:
        content = read_json(folder / RESULT)
        if command not in (None, content["command"]):
            return set()
        return {name for name in content["files"] if isinstance(name, str) and _is_inside(name.removesuffix("/"))}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _is_inside(name: str) -> bool:
    """Whether a name is that of an entry of a folder: what result.json lists is removed, and anyone may have written it."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def check_owned(argument: str, out: str | os.PathLike[str], command: str, names: Iterable[str]) -> None:
    """Raise InputError where a file that the command would write exists and is not of an earlier run of it."""
    folder = Path(out)
    owned = listed(folder, command)
    if (stranger := next((name for name in (RESULT, *names) if os.path.lexists(folder / name) and name not in owned), None)) is not None:
        rule = f"must be a folder where `expunge {command}` replaces no file but its own: choose another, or move what is there"
        raise InputError(argument, rule, os.fspath(folder / stranger))


def remove(folder: Path) -> None:
    """Remove a folder of our own and all in it, if it exists; several processes may do so at once."""
    while folder.is_dir() and not folder.is_symlink():
        with suppress(FileNotFoundError):  # another process has removed the entry that was next
            shutil.rmtree(folder)
