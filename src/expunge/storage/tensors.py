"""Save and load tensors as safetensors, written whole or not at all, with the digest of the weights they belong to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.storage.documents import excerpt
from expunge.storage.files import write_pieces
from expunge.storage.sharded import whole


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _update(digest, name, tensor)
    return digest.hexdigest()


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """A safetensors file; metadata are strings, and a digest of it all goes with them. The same content gives the same bytes."""
    from safetensors.torch import save

    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return write_pieces(path, _in_order(save(saved, metadata=dict(metadata) | {"content": content_digest(saved, metadata)})))


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
    if Path(path).exists() and not Path(path).is_file():
        raise InputError("path", "must be a safetensors file", f"{os.fspath(path)}, a folder or device")
    try:
        with open_tensors(path) as file:
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


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """safetensors' `safe_open` of one file, whatever other processes put in its place meanwhile.

    safetensors opens a path twice, for the header and for the tensors: of two files, if it was replaced in between. Both times this one is
    opened, by its descriptor; on Windows, which has no such names, a file that is open is not replaced. Python opens it first: what
    safetensors says of a file that is not there does not name it, and some names it does not take.
    """
    from safetensors import safe_open

    with open(path, "rb") as opened:
        descriptor = f"/dev/fd/{opened.fileno()}"
        with safe_open(descriptor if os.path.exists(descriptor) else os.fsdecode(path), framework="pt") as file:
            yield file


def content_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over the metadata and the names, types, shapes and bytes of the tensors."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        _update(digest, name, tensors[name])
    return digest.hexdigest()


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(heading(name, tensor))
    add_bytes(digest, tensor)


def heading(name: str, tensor: Tensor) -> bytes:
    """What a digest has before the bytes of a tensor."""
    return f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()


def add_bytes(digest: hashlib._Hash, tensor: Tensor) -> None:
    """Add the bytes of a tensor on any device, in the order of its indices; a sharded one is gathered, by all of its processes."""
    flat = whole(tensor).detach().contiguous().cpu().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
