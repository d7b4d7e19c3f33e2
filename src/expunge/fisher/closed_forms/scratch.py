"""Keep memory for per-sample gradients between batches, and cut samples into chunks that fit the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from expunge.fisher.closed_forms.early import PLACE, Early

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}  # what of per-sample tensors is alive at a time
KEPT_BYTES = 4 << 20  # a weight above is not copied: it would cost memory, and the library's own copy, in every pass, costs little time
LARGE_BYTES = {"cpu": 384 << 10, "cuda": 256 << 20}  # from here on a sample's product is worth a matmul of its own


class Scratch:
    """Named buffers that are reused: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._in_graphs: dict[
            int, Tensor
        ] = {}  # by id; a CUDA graph writes where it was captured, though a larger buffer took the name since
        self._begun: set[str] = set()
        self._weights: dict[str, Tensor] = {}
        self.early: Early | None = None  # for the next pass
        self._reserved: Tensor | None = None
        self._entries = 0  # per slot
        self._ends: dict[int, int] = {}  # of what is used

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape; what the name held before is overwritten."""
        key, size = (name, like.dtype, like.device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = like.new_empty(size)
        if _in_capture(buffer):
            self._in_graphs[id(buffer)] = buffer
        return buffer[:size].view(shape)

    def take_like(self, name: str, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of the same shape and, where it is dense, the same memory format."""
        dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        flat = self.take(name, (tensor.numel(),), tensor)
        return flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape)

    def reserve(self, like: Tensor, entries: int, slots: int) -> None:
        """Take memory for copies at once: small pieces that outlast a pass would break up the memory its tensors come from."""
        if self._reserved is None:
            self._reserved, self._entries = like.new_empty(entries * slots), entries

    def copied(self, slot: int, row: Tensor) -> Tensor:
        """A copy of (1, frames, ...), in the memory format it has; in the memory that is reserved for the slot, while there is some."""
        start, size = self._ends.get(slot, slot * self._entries), row.numel()
        whole = self._reserved
        if whole is None or whole.dtype != row.dtype or start + size > min((slot + 1) * self._entries, whole.numel()):
            return row.clone()
        self._ends[slot] = start + size
        flat, part = whole[start : start + size], row[0]
        dense = part.is_contiguous() or (part.dim() == 4 and part.is_contiguous(memory_format=torch.channels_last))
        place = flat.as_strided(part.shape, part.stride(), flat.storage_offset()) if dense else flat.view(part.shape)
        return place.copy_(part)[None]

    def has_begun(self, name: str) -> bool:
        """Whether something was added to the total of this name since `begin`."""
        return name in self._begun

    def total(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A sum that starts at zero with each `begin` and is then added to; in float32 for half precision."""
        total = self.take(f"total {name}", shape, wide(like.new_empty(0)))
        if name not in self._begun:
            self._begun.add(name)
            total.zero_()
        return total

    def added(self, name: str, part: Tensor) -> Tensor:
        """`total` with this part added to it."""
        begun, total = self.has_begun(name), self.take(f"total {name}", tuple(part.shape), part)
        self._begun.add(name)
        return total.add_(part) if begun else total.copy_(part)

    def add_early(self, early: Early | None) -> None:
        """Let the next pass add totals early; the memory that these had in an earlier pass is freed."""
        self.early = early
        if early is not None:
            names = {f"total {name}" for name in early.sums}
            self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] not in names}

    def place(self, name: str) -> str:
        """Under which name the total of this parameter is kept."""
        return PLACE if self.early is not None and name in self.early.sums else name

    def finish(self, name: str, total: Tensor) -> bool:
        """The total of this parameter is complete: add it where it may go early; whether it did."""
        if self.early is None or name not in self.early.sums:
            return False
        self.early.add(name, total)
        self._begun.discard(PLACE)  # the next parameter's starts at zero
        return True

    def channels_last(self, name: str, weight: Tensor) -> Tensor:
        """The weight in channels-last memory: a copy that is kept, since it is the same in every pass, unless it is large."""
        if weight.numel() * weight.element_size() > KEPT_BYTES:
            return weight
        if name not in self._weights:
            self._weights[name] = weight.contiguous(memory_format=torch.channels_last)
        return self._weights[name]

    def begin(self, slot: int = 0) -> None:
        self._begun.clear()
        self._ends.pop(slot, None)


def wide(tensor: Tensor) -> Tensor:
    """Half precision is squared and summed in float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def chunks(samples: int, size: int, like: Tensor) -> Iterator[range]:
    """Ranges of samples whose tensors of `size` entries each stay within the budget together."""
    step = max(1, min(samples, CHUNK_BYTES[_place(like)] // max(1, size * like.element_size())))
    for start in range(0, samples, step):
        yield range(start, min(start + step, samples))


def add_squared_products(total: Tensor, left: Tensor, right: Tensor, scratch: Scratch) -> None:
    """total += Σ_n (left_n right_n)² for (N, groups, I, L) and (N, groups, L, O) as (groups, I, O)."""
    samples, groups = left.shape[:2]
    shape = (left.shape[2], right.shape[3])
    if groups * math.prod(shape) * left.element_size() >= LARGE_BYTES[_place(left)]:
        product = scratch.take("products", shape, left)
        for group in range(groups):
            for one, other in zip(left[:, group], right[:, group], strict=True):
                torch.mm(one, other, out=product)
                total[group].addcmul_(product, product)
        return
    for rows in chunks(samples, groups * math.prod(shape), left):
        product = scratch.take("products", (len(rows) * groups, *shape), left)
        torch.bmm(*(part[rows.start : rows.stop].flatten(0, 1) for part in (left, right)), out=product)
        add_squares(total, product.view(len(rows), groups, *shape))


def add_squares(total: Tensor, products: Tensor) -> None:
    """total += Σ_n products_n²; the products are overwritten. Half precision is summed in float32."""
    products = products.to(total.dtype)
    if products.is_cuda and products.shape[0] > 1:
        total.add_(torch.linalg.vector_norm(products, dim=0).square_())  # one read of the products, where a square and a sum take three
    else:
        total.add_(products.square_().sum(0))


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right over many rows: float32 within `ROWS` rows, float64 across, since a matmul adds up one row after the other."""
    if left.shape[0] <= ROWS:
        return left.t() @ right
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for some, others in zip(left.split(ROWS), right.split(ROWS), strict=True):
        total += some.t() @ others
    return total


ROWS = 512


def _in_capture(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _place(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "cuda"
