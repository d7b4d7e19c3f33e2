"""The kernel of squares.c, where it was built (hatch_build.py) and the processor has the instructions; without it there are other ways."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).parent / "squares.shared"  # not .so, which would be taken for a Python module
PRIVATE_BYTES = 1 << 20  # as in squares.c
KINDS = {torch.float32: "float", torch.float64: "double"}

Pair = ctypes.c_int64 * 2


class _Geometry(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("samples", "channels", "out")),
        *((name, Pair) for name in ("image", "output", "kernel", "stride", "padding", "dilation")),
        ("threads", ctypes.c_int64),
    ]


@cache
def library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:  # not built, or for another system
        return None


@cache
def vector_bits() -> int:
    """Of the widest vectors there is a version for; 0 where there is none."""
    held = library()
    return 0 if held is None else int(held.vector_bits())


def takes(dtype: torch.dtype, channels: int, out: int) -> bool:
    """Whether the channels are whole tiles of the kernel: input channels by two vectors of output channels, or twice as many by one."""
    bits = vector_bits()
    if not bits or dtype not in KINDS:
        return False
    lanes, rows = bits // 8 // dtype.itemsize, bits // 64
    return out % lanes == 0 and channels % (rows if out % (2 * lanes) == 0 else 2 * rows) == 0


def totals_shape(threads: int, taps: int, channels: int, out: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of the memory the kernel writes to: a total for every thread where a weight is small. The first is the result."""
    small = taps * channels * out * dtype.itemsize <= PRIVATE_BYTES
    return (threads if small else 1, taps, channels, out)


def squares(
    images: Tensor,
    slopes: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    totals: Tensor,
    bits: int | None = None,
) -> None:
    """Σ_n (dW_n)² as (taps, channels, out) into totals[0], from contiguous (N, H, W, channels) and (N, H', W', out)."""
    held, (samples, height, width, channels) = library(), images.shape
    assert held is not None and totals.shape[0] in (1, torch.get_num_threads())
    geometry = _Geometry(
        samples, channels, slopes.shape[3], Pair(height, width), Pair(*slopes.shape[1:3]),
        Pair(*kernel), Pair(*stride), Pair(*padding), Pair(*dilation), torch.get_num_threads(),
    )  # fmt: skip
    run = getattr(held, f"squares_{KINDS[images.dtype]}_{bits or vector_bits()}")
    run(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (images, slopes)), ctypes.byref(geometry), ctypes.c_void_p(totals.data_ptr()))
