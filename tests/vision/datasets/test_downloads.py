"""Fetching over HTTP from a server in this process: cut connections, servers that cannot continue, wrong files, bad archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from expunge.cli import commands as cli
from expunge.errors import InputError
from expunge.vision.datasets import READERS, downloads
from expunge.vision.datasets.downloads import DOWNLOADS, DownloadError, File, fetch, get
from tests.memory import MIB, within

CONTENT = bytes(range(256)) * 12_000  # 3 MB, three pieces


class Server:
    """Serves one content; `cuts` are the lengths after which the next answers break off."""

    def __init__(self, content: bytes) -> None:
        self.content, self.cuts, self.ranges = content, [], True
        self.asked: list[str | None] = []
        self.status = 200
        self.length: str | None = None  # in place of the true one

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append(wanted)
        if self.status != 200:
            handler.send_error(self.status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(self.content):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", self.length or str(len(self.content) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(self.content)
        handler.wfile.write(self.content[start:end])


@contextmanager
def serving(content: bytes = CONTENT):
    server = Server(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}/file"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def published(server: Server, content: bytes = CONTENT, **others: object) -> File:
    return File(server.url, "sub/file.bin", len(content), hashlib.md5(content).hexdigest(), **others)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(downloads, "PAUSE", 0.01)
    monkeypatch.setattr(downloads, "TIMEOUT", 5)


def test_a_file_is_fetched_once(tmp_path, capsys):
    with serving() as server:
        file = published(server)
        (path,) = get("anything", tmp_path, files=[file], progress=True)
        assert path == tmp_path / "sub/file.bin" and path.read_bytes() == CONTENT
        assert capsys.readouterr().err.startswith("file.bin, MiB: 3 steps, ")
        get("anything", tmp_path, files=[file])
        assert server.asked == [None]
    assert list(path.parent.iterdir()) == [path]


def test_a_cut_connection_is_taken_up_where_it_broke(tmp_path):
    with serving() as server:
        server.cuts = [1_000_000, 1_500_000]
        assert fetch(published(server), tmp_path / "x").read_bytes() == CONTENT
        assert server.asked == [None, "bytes=1000000-", "bytes=2500000-"]


def test_the_next_call_goes_on_too(tmp_path):
    with serving() as server:
        server.cuts = [10] * downloads.ATTEMPTS
        with pytest.raises(DownloadError, match="5 attempts .*ended after 50 of 3072000 bytes.*goes on where this one stopped"):
            fetch(published(server), tmp_path / "x")
        assert (tmp_path / "x.partial").read_bytes() == CONTENT[:50] and not (tmp_path / "x").exists()
        assert fetch(published(server), tmp_path / "x").read_bytes() == CONTENT
        assert server.asked[-1] == "bytes=50-" and not (tmp_path / "x.partial").exists()


def test_a_server_without_ranges_starts_anew(tmp_path):
    with serving() as server:
        server.cuts, server.ranges = [2_000_000], False
        assert fetch(published(server), tmp_path / "x").read_bytes() == CONTENT
        assert server.asked == [None, "bytes=2000000-"]


def test_a_wrong_file_is_thrown_away(tmp_path):
    wrong = bytes(len(CONTENT))
    with serving(wrong) as server:
        with pytest.raises(DownloadError, match="must have the MD5 .* found"):
            fetch(published(server), tmp_path / "x")
        assert server.asked == [None] and list(tmp_path.iterdir()) == []
    for other in (CONTENT[:-1], CONTENT + b"more"):
        with serving(other) as server:
            with pytest.raises(DownloadError, match=f"must have {len(CONTENT)} bytes; the server offers {len(other)}"):
                fetch(published(server), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [b"other" * 100, b"o" * len(CONTENT), b"o" * (len(CONTENT) + 5)], ids=["short", "whole", "long"])
def test_a_partial_file_of_something_else_does_not_last(tmp_path, left):
    (tmp_path / "x.partial").write_bytes(left)
    with serving() as server:
        assert fetch(published(server), tmp_path / "x").read_bytes() == CONTENT


def test_a_partial_file_longer_than_what_the_server_has(tmp_path):
    (tmp_path / "x.partial").write_bytes(b"o" * 2_000)
    with serving(CONTENT[:1_000]) as server:
        with pytest.raises(DownloadError, match="the server offers 1000"):
            fetch(published(server), tmp_path / "x")
        assert server.asked == ["bytes=2000-", None]


def test_a_damaged_file_is_fetched_again(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT[:-1] + b"?")
    with serving() as server:
        assert fetch(published(server), tmp_path / "x").read_bytes() == CONTENT


def test_a_missing_page_is_told_at_once_and_a_failing_server_is_asked_again(tmp_path):
    with serving() as server:
        server.status = 404
        with pytest.raises(DownloadError, match="404"):
            fetch(published(server), tmp_path / "x")
        assert len(server.asked) == 1
        server.status = 503
        with pytest.raises(DownloadError, match="503"):
            fetch(published(server), tmp_path / "x")
        assert len(server.asked) == 1 + downloads.ATTEMPTS


@pytest.mark.parametrize("length", ["abc", "-1", "3072000.0", "3072000, 3072000", "0x2ee000", "9" * 5000, "٣"])
def test_a_length_that_is_none_is_told(tmp_path, length):
    with serving() as server:
        server.length = length.encode().decode("latin1")
        with pytest.raises(DownloadError, match="must have 3072000 bytes; the server offers") as caught:
            fetch(published(server), tmp_path / "x")
        assert len(str(caught.value)) < 400 and list(tmp_path.iterdir()) == []


def test_a_range_refused_though_none_was_asked_for(tmp_path):
    with serving() as server:
        server.status = 416
        with pytest.raises(DownloadError, match="416"):
            fetch(published(server), tmp_path / "x")
        assert server.asked == [None] and list(tmp_path.iterdir()) == []


def test_a_pipe_or_a_folder_in_the_place_of_a_file(tmp_path):
    for name in ("x", "x.partial"):
        for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
            make(tmp_path / name)
            with serving() as server, pytest.raises(DownloadError, match=f"{name} must be a plain file"):
                fetch(published(server), tmp_path / "x")
            assert server.asked == []
            remove(tmp_path / name)


def packed(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                tar.addfile(content)
    return out.getvalue()


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("set/link")
    info.type, info.linkname = kind, "../../outside"
    return info


def test_an_archive_is_unpacked_beside_itself_and_again(tmp_path):
    archive = packed({"set/a": b"one", "set/deep/b": b"two"})
    with serving(archive) as server:
        file = published(server, archive, unpack="set")
        for _ in range(2):
            get("anything", tmp_path, files=[file])
            assert (tmp_path / "sub/set/a").read_bytes() == b"one" and (tmp_path / "sub/set/deep/b").read_bytes() == b"two"
            (tmp_path / "sub/set/a").write_bytes(b"damaged")
        assert len(server.asked) == 1


BAD = {
    "climbs": {"set/../../out": b"x"},
    "absolute": {"/tmp/out": b"x"},
    "elsewhere": {"other/out": b"x"},
    "symbolic link": {"link": link(tarfile.SYMTYPE)},
    "hard link": {"link": link(tarfile.LNKTYPE)},
    "device": {"link": link(tarfile.CHRTYPE)},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_members_are_refused_before_anything_is_written(tmp_path, name):
    archive = tmp_path / "in" / "a.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(packed({"set/first": b"good"} | BAD[name]))
    with pytest.raises(InputError, match="plain files in set/ alone; nothing was unpacked"):
        downloads.unpack(archive, "set")
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "a.tar.gz"]


def test_what_an_archive_holds_is_bounded(tmp_path, monkeypatch):
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(packed({"set/a": bytes(600), "set/b": bytes(600)}))
    monkeypatch.setattr(downloads, "LARGEST", 1_000)
    with pytest.raises(InputError, match="at most 1000 bytes; nothing was unpacked; found 1200"):
        downloads.unpack(archive, "set")
    assert list(tmp_path.iterdir()) == [archive]


def test_a_cut_archive_is_an_error(tmp_path):
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(packed({"set/a": bytes(range(256)) * 100})[:200])
    with pytest.raises(DownloadError, match="could not be unpacked"):
        downloads.unpack(archive, "set")


def member(name: str, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


BOMB = gzip.compress(bytes(2**24), 9)
BROKEN = {
    "a header that says it is long": (
        gzip.compress(member("set/a", type=tarfile.XHDTYPE, size=2**32)) + BOMB * 100,
        "could not be unpacked",
    ),
    "a name that says it is long": (
        gzip.compress(member("set/a", type=tarfile.GNUTYPE_LONGNAME, size=2**32)) + BOMB * 100,
        "could not be unpacked",
    ),
    "a file that says it is long": (gzip.compress(member("set/a", size=2**33)) + BOMB * 100, "at most 268435456 bytes"),
    "zeros": (BOMB * 4, ""),
    "many files": (gzip.compress(member("set/a") * 2000), "at most 1000 files"),
    "damaged": (gzip.compress(member("set/a", size=600) + bytes(1024))[:-30] + b"\xff" * 40, "could not be unpacked"),
    "not gzip": (b"anything", "could not be unpacked"),
    "a file in the folder's place": (gzip.compress(member("set", size=0) + bytes(1024)), "plain files in set/ alone"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_archives_that_lie_are_refused_within_bounds(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / "a.tar.gz").write_bytes(content)

    def read() -> None:
        if message:
            with pytest.raises((InputError, DownloadError), match=message):
                downloads.unpack(tmp_path / "a.tar.gz", "set")
        else:
            downloads.unpack(tmp_path / "a.tar.gz", "set")

    assert within(700 * MIB, read)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_every_reader_has_its_download_and_the_command_names_them(capsys):
    assert DOWNLOADS.keys() == READERS.keys()
    assert all(len(file.md5) == 32 and file.size > 0 for files in DOWNLOADS.values() for file in files)
    assert cli.main(["data", "get", "nonsense"]) == 2
    assert "cifar10, cifar100, mnist, fashion-mnist, tiny-imagenet" in capsys.readouterr().err


def test_the_command_fetches_into_the_folder_given(tmp_path, monkeypatch, capsys):
    with serving() as server:
        monkeypatch.setitem(DOWNLOADS, "cifar10", (published(server),))
        assert cli.main(["data", "get", "cifar10", "--data", str(tmp_path)]) == 0
        monkeypatch.setenv("EXPUNGE_DATA", str(tmp_path / "other"))
        assert cli.main(["data", "get", "cifar10"]) == 0
    assert (tmp_path / "sub/file.bin").read_bytes() == (tmp_path / "other/sub/file.bin").read_bytes() == CONTENT
    assert str(tmp_path / "sub/file.bin") in capsys.readouterr().out


def test_two_at_once_do_not_write_one_file(tmp_path):
    """The second would go on after what the first has so far, and write into the file that the first has checked and named."""
    with serving() as server:
        file, refused = published(server), []
        answer = server.answer

        def slow(handler):
            server.answer = answer
            with pytest.raises(DownloadError, match="file.bin is being fetched by another process"):
                fetch(file, tmp_path / "file.bin")
            refused.append(True)
            answer(handler)

        server.answer = slow
        assert fetch(file, tmp_path / "file.bin").read_bytes() == CONTENT
    assert refused and [path.name for path in tmp_path.iterdir()] == ["file.bin"]
