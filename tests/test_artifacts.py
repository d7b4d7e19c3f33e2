"""Files are written whole or not at all, and only where a plain file is or may be."""

import errno
import os
from pathlib import Path

import pytest

from expunge.artifacts import write_bytes
from expunge.errors import InputError
from expunge.outputs import check_file, check_folder


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "new-link").symlink_to(tmp_path / "new")
    for link, file in (("link", "file"), ("new-link", "new")):
        assert write_bytes(tmp_path / link, b"new") == tmp_path / link
        assert (tmp_path / link).is_symlink() and (tmp_path / file).read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "new", "new-link"]


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(InputError, match=f"path: must be a plain file, or a new one; found .*{name}"):
            write_bytes(tmp_path / name, b"new")
        with pytest.raises(InputError, match="out: must be the path of a plain file"):
            check_file("out", tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "folder").is_dir() and len(list(tmp_path.iterdir())) == 3


def test_folders_that_can_be_made_are_fine(tmp_path):
    check_folder("out", tmp_path / "deep" / "er")
    check_file("out", tmp_path / "deep" / "file")
    check_file("out", Path("file"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_told_of_the_file_and_nothing_is_lost(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_bytes(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_bytes(tmp_path / "file", b"new")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
