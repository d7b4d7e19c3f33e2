"""Files are written whole or not at all, and only where a plain file is or may be."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from expunge.errors import InputError
from expunge.storage.documents import read_json
from expunge.storage.files import check_file, check_folder, write_bytes, write_json
from expunge.storage.tensors import load_tensors, save_tensors
from tests.disks import SMALL, small_disk, small_files


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


@pytest.mark.parametrize("full", [small_disk, small_files])
def test_a_disk_that_is_really_full(tmp_path, full):
    with full(tmp_path) as folder:
        write_bytes(folder / "file", b"old")
        with pytest.raises(OSError) as raised:
            write_bytes(folder / "file", b"new" * SMALL)
        assert raised.value.filename == str(folder / "file")
        assert (folder / "file").read_bytes() == b"old" and [path.name for path in folder.iterdir()] == ["file"]


WRITING = """
import os, sys, time
import expunge.storage.files
def stuck(descriptor):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = stuck
expunge.storage.files.write_bytes(sys.argv[1], b"content")
"""


def test_what_killed_writers_leave_is_removed_and_what_others_are_writing_is_not(tmp_path):
    """By the next writer of any file in the folder; the lock of a writer that lives tells."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path / name)], stdout=subprocess.PIPE) for name in ("one", "two")]
    for writer in writers:
        assert writer.stdout.readline() == b"writing\n"
    mine = {".expunge-unfinished": "file", ".one.0123456789abcdef": "file"}
    for name in mine:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / ".expunge-unfinished-pipe")  # to open it would take for ever
    mine |= {".expunge-unfinished-pipe": "pipe"}
    writers[0].kill()
    writers[0].wait()
    write_bytes(tmp_path / "three", b"content")
    left = {path.name for path in tmp_path.iterdir()} - {*mine, "three"}
    assert len(left) == 1 and next(iter(left)).startswith(".expunge-unfinished-")  # the one that is being written
    writers[1].kill()
    for writer in writers:
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
    write_bytes(tmp_path / "one", b"content")
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "one", "three"}


def test_many_writers_in_one_folder_do_not_disturb_each_other(tmp_path):
    failed = []

    def writing(name):
        try:
            for number in range(40):
                write_bytes(tmp_path / name, f"{name}{number}".encode())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=writing, args=(f"file{number % 3}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and {path.name for path in tmp_path.iterdir()} == {"file0", "file1", "file2"}


def test_names_as_long_as_the_system_allows(tmp_path):
    write_bytes(tmp_path / ("x" * 255), b"content")
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


SAVING = """
import sys
import torch
from expunge.storage.tensors import save_tensors
tensors = {f"part{number}": torch.arange(number, dtype=torch.float32) for number in range(9)} | {"half": torch.ones(3, dtype=torch.float16)}
save_tensors(sys.argv[1], tensors, {f"name{number}": f"λ {number}" for number in range(9)} | {"kind": "some"})
"""


@pytest.mark.slow
def test_the_same_tensors_are_the_same_bytes_in_every_process(tmp_path):
    written = set()
    for number in range(2):
        environment = os.environ | {"PYTHONHASHSEED": str(number)}
        subprocess.run([sys.executable, "-c", SAVING, str(tmp_path / "file")], env=environment, check=True)
        written.add(hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest())
    assert len(written) == 1
    tensors, metadata = load_tensors(tmp_path / "file", "some")
    assert metadata["name3"] == "λ 3" and torch.equal(tensors["part5"], torch.arange(5.0)) and tensors["half"].dtype == torch.float16
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert len(file.keys()) == 10


@pytest.mark.parametrize("text", ["", '"quoted" \\ \n \x00 \u2028', "λ 語 \U0001f600", "x" * 999])
def test_any_metadata_come_back(tmp_path, text):
    for length in range(9):  # with every filling of the header
        save_tensors(tmp_path / "file", {"one": torch.ones(2)}, {"kind": "some", "text": text, "y" * length: ""})
        assert load_tensors(tmp_path / "file", "some")[1]["text"] == text


NOT_UNICODE = os.fsdecode(b"n\xffn")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_unicode(tmp_path):
    path = save_tensors(tmp_path / NOT_UNICODE, {"one": torch.ones(2)}, {"kind": "some"})
    assert torch.equal(load_tensors(path, "some")[0]["one"], torch.ones(2))
    with pytest.raises(InputError, match="must be a whole safetensors file"):
        load_tensors(write_bytes(tmp_path / f"x{NOT_UNICODE}", b"text"), "some")


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="where descriptors have no names, files that are open are not replaced")
@pytest.mark.parametrize("after", [1, 9999, 100, None])
def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path, monkeypatch, after):
    """Between the two times that safetensors opens it: by a smaller or a larger one, by other content of the same length; or removed."""
    path, opened, times = save_tensors(tmp_path / "file", {"a": torch.ones(100)}, {"kind": "some"}), torch.UntypedStorage.from_file, []

    def replacing(*arguments, **options):
        times.append(save_tensors(path, {"a": torch.zeros(after)}, {"kind": "some", "more": "!"}) if after else path.unlink())
        return opened(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replacing)  # the second time
    tensors, metadata = load_tensors(path, "some")
    assert len(times) == 1 and torch.equal(tensors["a"], torch.ones(100)) and metadata == {"kind": "some"}


def test_json_that_is_written_can_be_read(tmp_path):
    """A line of an error may name such a file."""
    content = {"error": f"no data: {NOT_UNICODE}", NOT_UNICODE: [1, 0.1, None, True, "λ"]}
    assert read_json(write_json(tmp_path / "file", content)) == {"error": "no data: n?n", "n?n": [1, 0.1, None, True, "λ"]}
