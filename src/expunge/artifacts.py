"""Tensors on disk: safetensors + JSON, written whole or not at all, keyed by the digest of the weights they belong to."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from expunge.documents import excerpt
from expunge.errors import InputError
from expunge.locks import is_at, lock

UNFINISHED = ".expunge-unfinished-"  # begins the name of a file that is being written


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _update(digest, name, tensor)
    return digest.hexdigest()


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file atomically: it holds the whole content or, after a crash or a full disk, what it held before.

    A link stays, the file it leads to is written. A device, a pipe or a folder is refused: to replace it would destroy it.
    """
    return _write(path, [content])


def _write(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> Path:
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InputError("path", "must be a plain file, or a new one", os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(target.parent)
    try:
        with _unfinished(target.parent) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # instead of the temporary file, or of none
    return Path(path)


@contextmanager
def _unfinished(folder: Path) -> Iterator[IO[bytes]]:
    """A new file in the folder, locked so that others see that its writer lives; removed unless it was renamed within."""
    while True:
        name = folder / f"{UNFINISHED}{secrets.token_hex(8)}"  # not mkstemp's, which only its owner may read
        with name.open("xb") as file:
            with suppress(OSError):  # a file system without locks, where nobody takes the file for a dead writer's
                if not lock(file) or not is_at(file, name):
                    continue  # taken for a dead writer's before it was locked
            try:
                yield file
            finally:
                name.unlink(missing_ok=True)
            return


def _remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left in a folder; those that live hold a lock."""
    for entry in os.scandir(folder):
        if entry.name.startswith(UNFINISHED) and entry.is_file(follow_symlinks=False):
            with suppress(OSError), open(entry.path, "r+b") as file:
                if lock(file):
                    os.unlink(entry.path)


def write_json(path: str | os.PathLike[str], content: Any) -> Path:
    """Text that is not Unicode, as a file's name may be, gets question marks: `documents.parse_json` would refuse it."""
    content = json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
    return write_bytes(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """A safetensors file; metadata are strings, and a digest of it all goes with them. The same content gives the same bytes."""
    from safetensors.torch import save

    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return _write(path, _in_order(save(held, metadata=dict(metadata) | {"content": content_digest(held, metadata)})))


def _in_order(content: bytes) -> tuple[bytes, memoryview]:
    """The header and the rest of a safetensors file, metadata by name: safetensors writes them in an order that changes from call to call.

    8 bytes of length, a header in JSON that is filled up to a multiple of 8 with blanks, the tensors.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))}
    text = json.dumps(metadata | header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, memoryview(content)[end:]


def load_tensors(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and metadata of a safetensors file that holds a `kind`, whole and as it was written."""
    from safetensors import safe_open

    if Path(path).exists() and not Path(path).is_file():
        raise InputError("path", "must be a safetensors file", f"{os.fspath(path)}, a folder or device")
    try:
        # First by Python: safetensors' error about a file that is not there does not name it, and some names it does not take.
        with open(path, "rb") as opened, safe_open(_in_unicode(path, opened), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except OSError:
        raise
    except Exception as error:  # a header that lies can fail in any way: sizes that overflow, types torch does not have
        raise InputError("path", f"must be a whole safetensors file ({excerpt(str(error))})", os.fspath(path)) from error
    if metadata.get("kind") != kind:
        raise InputError("path", f"must hold {kind!r}", excerpt(metadata.get("kind", "no kind")))
    if metadata.pop("content", None) != content_digest(tensors, metadata):
        raise InputError("path", f"must hold {kind!r} as it was saved; its content was changed", os.fspath(path))
    return tensors, metadata


def _in_unicode(path: str | os.PathLike[str], opened: IO[bytes]) -> str:
    """The path of an open file, or where that is not Unicode another that leads to it."""
    name = os.fsdecode(path)
    return name if name.isascii() or name == name.encode(errors="replace").decode() else f"/dev/fd/{opened.fileno()}"


def content_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over the metadata and the names, types, shapes and bytes of the tensors."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        _update(digest, name, tensors[name])
    return digest.hexdigest()


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    add_bytes(digest, tensor)


def add_bytes(digest: hashlib._Hash, tensor: Tensor) -> None:
    """Of a tensor on any device, in the order of its indices."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
