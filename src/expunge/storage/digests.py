"""Compute the digest of a model's weights beside other work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from expunge.storage.sharded import is_sharded
from expunge.storage.tensors import heading, weights_digest

COPIED_BYTES = 1 << 30  # a larger model is not copied on its device
PIECE_BYTES = 8 << 20


def digest_beside(model: nn.Module) -> Callable[[], str]:
    """Return a function for the `weights_digest` of the weights as they are now.

    On a GPU they are copied there and hashed by a thread, while other work goes on; elsewhere the digest is computed at once.
    """
    entries = [*model.named_parameters(), *model.named_buffers()]
    device = entries[0][1].device if entries else torch.device("cpu")
    plain = all(tensor.device == device and not is_sharded(tensor) for _, tensor in entries)
    if device.type != "cuda" or not plain or sum(tensor.nbytes for _, tensor in entries) > COPIED_BYTES:
        digest = weights_digest(model)
        return lambda: digest
    headings = [(heading(name, tensor), tensor.nbytes) for name, tensor in entries]
    copies = [end_to_end([tensor for _, tensor in entries])]
    stream, buffer = torch.cuda.Stream(device), torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(device))

    def hashed() -> str:
        with torch.cuda.stream(stream):
            return digest_of(headings, pieces(copies.pop(), buffer))

    pool = ThreadPoolExecutor(1)
    future = pool.submit(hashed)
    pool.shutdown(wait=False)
    return future.result


def end_to_end(tensors: list[Tensor]) -> Tensor:
    """The bytes of all tensors, each in the order of its indices."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def pieces(content: Tensor, buffer: Tensor) -> Iterator[memoryview]:
    """The bytes in pieces of the buffer, which is written again and again: what else runs on the device never waits for long."""
    for part in content.split(len(buffer)):
        yield buffer[: len(part)].copy_(part).numpy().data


def digest_of(headings: list[tuple[bytes, int]], content: Iterator[memoryview]) -> str:
    """As `weights_digest`, from what stands before each tensor, its number of bytes, and all of these end to end, in pieces."""
    digest, rest = hashlib.sha256(), memoryview(b"")
    for text, size in headings:
        digest.update(text)
        while size:
            rest = rest or next(content)
            digest.update(rest[:size])
            size, rest = size - len(rest[:size]), rest[size:]
    return digest.hexdigest()
