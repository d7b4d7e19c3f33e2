"""Locks: one holder at a time, none after a kill, and files that are closed before they are renamed or removed where they must be."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from expunge.storage import files, locks
from expunge.storage.files import UNFINISHED, write_bytes
from expunge.storage.locks import is_at, lock, try_lock, try_lock_and_remove

HOLDING = """
import sys, time
from pathlib import Path
from expunge.storage import locks
with getattr(locks, sys.argv[1])(Path(sys.argv[2])) as free:
    print(free, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["try_lock", "try_lock_and_remove"])
@pytest.mark.slow
def test_one_process_at_a_time_and_none_after_a_kill(name, tmp_path):
    path, hold = tmp_path / "a.lock", getattr(locks, name)
    child = subprocess.Popen([sys.executable, "-c", HOLDING, name, str(path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout.readline() == "True\n"
        with hold(path) as free:
            assert not free
        assert path.exists()  # who does not hold it does not remove it
        child.kill()
    assert child.returncode == -signal.SIGKILL
    with hold(path) as free:
        assert free
        with hold(path) as again:  # nor twice in one process
            assert not again
    assert path.exists() == (name == "try_lock")


def test_a_lock_goes_with_the_open_file_not_with_its_name(tmp_path):
    with (tmp_path / "one").open("xb") as file:
        assert lock(file) and is_at(file, tmp_path / "one")
        os.replace(tmp_path / "one", tmp_path / "two")
        assert is_at(file, tmp_path / "two") and not is_at(file, tmp_path / "one")
        with (tmp_path / "two").open("r+b") as other:
            assert not lock(other)
    with (tmp_path / "two").open("r+b") as other:
        assert lock(other)


def test_content_of_a_lock_file_is_left_alone(tmp_path):
    (tmp_path / "a.lock").write_bytes(b"mine")
    with try_lock(tmp_path / "a.lock") as free:
        assert free
    assert (tmp_path / "a.lock").read_bytes() == b"mine"


def test_who_only_imports_us_has_no_hooks_of_filelock():
    code = "import sys, expunge; expunge.unlearn; import expunge.storage.files; sys.exit('filelock' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def opened() -> set[str]:
    """The files this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


@pytest.fixture
def windows(monkeypatch):
    """A system that neither renames nor removes files that are open."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(locks, "OPEN_FILES_STAY", True)

    def strict(call):
        def checked(path, *arguments, **options):
            if {os.path.realpath(each) for each in (path, *arguments)} & opened():
                raise PermissionError(13, "being used by another process", os.fspath(path))
            return call(path, *arguments, **options)

        return checked

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, strict(getattr(os, name)))
    with pytest.raises(PermissionError), open(os.devnull) as file:  # the system is what it says
        os.unlink(file.name)


def test_files_are_written_where_open_files_stay(windows, tmp_path):
    write_bytes(tmp_path / "file", b"old")
    write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"

    def failing():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_pieces(tmp_path / "file", failing())
    assert (tmp_path / "file").read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1


def test_only_old_leftovers_are_removed_where_open_files_stay(windows, tmp_path):
    """A young one may be of a writer that has closed it and is about to rename it."""
    young, old, locked = (tmp_path / f"{UNFINISHED}{name}" for name in ("young", "old", "locked"))
    for path in (young, old, locked):
        path.touch()
    for path in (old, locked):
        os.utime(path, (time.time() - 3600,) * 2)
    with locked.open("r+b") as file:
        assert lock(file)
        write_bytes(tmp_path / "file", b"content")
        assert {path.name for path in tmp_path.iterdir()} == {"file", young.name, locked.name}


def test_a_lock_is_removed_where_open_files_stay(windows, tmp_path):
    with try_lock_and_remove(tmp_path / "a.lock") as free:
        assert free and (tmp_path / "a.lock").exists()
    assert not (tmp_path / "a.lock").exists()
    with try_lock_and_remove(tmp_path / "a.lock") as free, (tmp_path / "a.lock").open("rb"):
        assert free
    assert not (tmp_path / "a.lock").exists()
    with (tmp_path / "a.lock").open("ab"):  # opened by another process, which is about to try the lock
        with try_lock_and_remove(tmp_path / "a.lock") as free:
            assert free
        assert (tmp_path / "a.lock").exists()


@pytest.mark.slow
def test_many_writers_do_not_disturb_each_other_where_open_files_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "OPEN_FILES_STAY", True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_bytes(tmp_path / f"file{number % 4}", b"content" * 100), range(200)))
    assert {path.name for path in tmp_path.iterdir()} == {f"file{number}" for number in range(4)}
