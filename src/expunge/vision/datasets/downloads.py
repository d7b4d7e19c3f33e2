"""Download datasets from where they are published: in pieces that can be resumed, checked, and unpacked where the readers need it."""

from __future__ import annotations

import gzip
import os
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, cast

from expunge.errors import ExpungeError, InputError
from expunge.runtime.progress import track
from expunge.storage.documents import excerpt
from expunge.storage.files import write_bytes
from expunge.storage.locks import try_lock_and_remove
from expunge.vision.datasets.files import climbs, data_folder, md5_of

PIECE = 2**20
ATTEMPTS = 5
PAUSE = 1.0  # seconds between two attempts
TIMEOUT = 60.0  # seconds without a byte
LARGEST = 2**28  # bytes an archive may hold; the largest, CIFAR-100's, holds 187 MB
MEMBERS = 1000  # files of an archive; they have up to nine
HEADERS = 2**23  # bytes of an archive beside its files


class DownloadError(ExpungeError):
    """A file could not be fetched, or is not the published one."""


@dataclass(frozen=True)
class File:
    """A published file: where it is, where it goes below the data folder, and what it must be."""

    url: str
    path: str
    size: int
    md5: str
    unpack: str | None = None
    """The folder inside the archive that is unpacked beside it."""


def _idx(base: str, folder: str, published: dict[str, tuple[int, str]]) -> tuple[File, ...]:
    return tuple(File(f"{base}{name}.gz", f"{folder}/{name}.gz", size, md5) for name, (size, md5) in published.items())


TORONTO = "https://www.cs.toronto.edu/~kriz/"
DOWNLOADS: dict[str, tuple[File, ...]] = {
    "cifar10": (
        File(
            f"{TORONTO}cifar-10-python.tar.gz",
            "cifar-10-python.tar.gz",
            170_498_071,
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-batches-py",
        ),
    ),
    "cifar100": (
        File(
            f"{TORONTO}cifar-100-python.tar.gz",
            "cifar-100-python.tar.gz",
            169_001_437,
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python",
        ),
    ),
    # The authors' own server no longer serves the files; this is the copy PyTorch keeps, byte for byte the same.
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        {
            "train-images-idx3-ubyte": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            "train-labels-idx1-ubyte": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            "t10k-images-idx3-ubyte": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            "t10k-labels-idx1-ubyte": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        },
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte": (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            "train-labels-idx1-ubyte": (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            "t10k-images-idx3-ubyte": (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            "t10k-labels-idx1-ubyte": (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        },
    ),
    "tiny-imagenet": (
        File("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "tiny-imagenet-200.zip", 248_100_043, "90528d7ca1a48142e341f4ef8d21d0de"),
    ),
}


def get(
    name: str, data: str | os.PathLike[str] | None = None, files: Sequence[File] | None = None, progress: bool = False
) -> tuple[Path, ...]:
    """Fetch a dataset into the data folder; what is there already, whole, is not fetched again. `files` replaces the published list.

    A fetch that was cut goes on where it stopped, here and in the next call. Returns the paths of the files.
    """
    if files is None:
        if name not in DOWNLOADS:
            raise InputError("name", f"must be one of {', '.join(DOWNLOADS)} (digits need no download)", name)
        files = DOWNLOADS[name]
    root = data_folder(data)
    paths = []
    for file in files:
        paths.append(fetch(file, root / file.path, progress))
        if file.unpack is not None:
            unpack(paths[-1], file.unpack)
    return tuple(paths)


def fetch(file: File, target: Path, progress: bool = False) -> Path:
    """One file, under its own name only once it is whole and the published one; until then it is `NAME.partial`."""
    partial = target.with_name(f"{target.name}.partial")
    for path in (target, partial):
        if path.exists() and not path.is_file():
            raise DownloadError(f"{path} must be a plain file, or a new one; it is a folder, a pipe or a device")
    if _is_whole(file, target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with try_lock_and_remove(target.with_name(f".{target.name}.expunge-lock")) as free:
        if not free:
            raise DownloadError(f"{target} is being fetched by another process: wait for its end")
        return target if _is_whole(file, target) else _fetch(file, target, partial, progress)


def _is_whole(file: File, target: Path) -> bool:
    return target.exists() and md5_of(target) == file.md5


def _fetch(file: File, target: Path, partial: Path, progress: bool) -> Path:
    reason: object = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        begun = partial.stat().st_size if partial.exists() else 0
        try:
            if begun != file.size:
                _receive(file, partial, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and begun:  # the server's file ends before ours does: ours is of another
                partial.unlink(missing_ok=True)
            elif error.code < 500:
                raise DownloadError(f"{file.url}: {error}") from error
            reason = error
            continue
        except (OSError, HTTPException, ValueError) as error:  # the last of a redirection to an address that is none
            reason = error
            continue
        digest = md5_of(partial)
        if digest == file.md5:
            os.replace(partial, target)
            return target
        partial.unlink()
        if not begun:
            raise DownloadError(f"{file.url} must have the MD5 {file.md5} and {file.size} bytes; found {digest}, and threw it away")
        reason = f"what was there before was of another file (MD5 {digest})"
    raise DownloadError(
        f"{file.url} could not be fetched in {ATTEMPTS} attempts ({reason}); the same command goes on where this one stopped"
    )


def _receive(file: File, partial: Path, progress: bool) -> None:
    """Append what is missing, from the beginning where the server cannot continue; a cut connection is an `OSError`."""
    begun = partial.stat().st_size if partial.exists() else 0
    if begun > file.size:
        begun = 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={begun}-"} if begun else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {begun}-"):
            begun = 0
            offered = (answer.headers.get("Content-Length") or str(file.size)).strip()
            if offered != str(file.size):
                raise DownloadError(f"{file.url} must have {file.size} bytes; the server offers {excerpt(offered)}")
        with partial.open("ab" if begun else "wb") as out:
            description = f"{Path(file.path).name}, MiB"
            for piece in track(_pieces(answer), description, total=-(-(file.size - begun) // PIECE), enabled=progress):
                out.write(piece)
                if out.tell() > file.size:
                    break
            length = out.tell()
    if length < file.size:
        raise ConnectionError(f"the connection ended after {length} of {file.size} bytes")


def _pieces(answer: HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read(PIECE):
        yield piece


def unpack(archive: Path, folder: str) -> Path:
    """The files of a gzipped tar archive, which must all lie in `folder`, beside the archive; each appears whole or not at all."""
    try:
        _check_members(archive, folder)
        with _members(archive) as tar:
            for member in tar:
                if (content := tar.extractfile(member)) is not None:
                    write_bytes(archive.parent / member.name, content.read())
    except ExpungeError:
        raise
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError) as error:
        raise DownloadError(f"{archive} could not be unpacked: {excerpt(str(error))}") from error
    return archive.parent / folder


def _check_members(archive: Path, folder: str) -> None:
    """Check each member as it is read, before what follows it is unpacked."""
    total = 0
    with _members(archive) as tar:
        for number, member in enumerate(tar):
            inside = member.name.startswith(f"{folder}/") or (member.name == folder and member.isdir())
            plain = (member.isfile() and not member.issparse()) or member.isdir()
            if climbs(member.name) or not inside or not plain:
                rule = f"{archive} must hold plain files in {folder}/ alone; nothing was unpacked"
                raise InputError("archive", rule, excerpt(member.name))
            total += member.size
            if total > LARGEST:
                raise InputError("archive", f"{archive} must hold at most {LARGEST} bytes; nothing was unpacked", total)
            if number >= MEMBERS:
                raise InputError("archive", f"{archive} must hold at most {MEMBERS} files; nothing was unpacked", "more")


@contextmanager
def _members(archive: Path) -> Iterator[tarfile.TarFile]:
    """The members in order, from no more bytes than such an archive may have: headers too can claim to be gigabytes long."""
    with gzip.open(archive) as unpacked, tarfile.open(fileobj=cast(IO[bytes], _Bounded(unpacked, LARGEST + HEADERS)), mode="r|") as tar:
        yield tar


@dataclass
class _Bounded:
    """A file that can be read; raises OSError after `left` bytes."""

    file: gzip.GzipFile
    left: int

    def read(self, size: int) -> bytes:
        content = self.file.read(min(size, PIECE))
        self.left -= len(content)
        if self.left < 0:
            raise OSError("it holds more than it may")
        return content
