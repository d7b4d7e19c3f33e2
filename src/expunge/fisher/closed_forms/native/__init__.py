"""Call the kernel of squares.c where it was built (hatch_build.py) and the processor has its instructions."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from expunge.fisher.closed_forms.scratch import Scratch

LIBRARY = Path(__file__).parent / "squares.shared"  # not .so, which would be taken for a Python module
PRIVATE_BYTES = 1 << 20  # of a weight, up to which each thread takes samples and has a total of its own
KINDS = {torch.float32: "float", torch.float64: "double"}

Pair = ctypes.c_int64 * 2


class _Geometry(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("samples", "channels", "out")),
        *((name, Pair) for name in ("image", "output", "kernel", "stride", "padding", "dilation")),
        *((name, ctypes.c_int64) for name in ("threads", "by_samples")),
    ]


@cache
def library() -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        return loaded if loaded.geometry_bytes() == ctypes.sizeof(_Geometry) else None  # else built from another version of the source
    except (OSError, AttributeError):  # not built, for another system, or of another version too
        return None


@cache
def vector_bits() -> int:
    """Of the widest vectors there is a version for; 0 where there is none."""
    kernels = library()
    return 0 if kernels is None else int(kernels.vector_bits())


def takes(dtype: torch.dtype, channels: int, out: int) -> bool:
    """Whether the channels are whole tiles of the kernel: input channels by two vectors of output channels, or twice as many by one."""
    bits = vector_bits()
    if not bits or dtype not in KINDS:
        return False
    lanes, rows = bits // 8 // dtype.itemsize, bits // 64
    return out % lanes == 0 and channels % (rows if out % (2 * lanes) == 0 else 2 * rows) == 0


def squares(
    images: Tensor,
    slopes: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    scratch: Scratch,
) -> Tensor:
    """Σ_n (dW_n)² as (taps, channels, out) in scratch memory, from contiguous (N, H, W, channels) and (N, H', W', out)."""
    kernels, threads, (samples, height, width, channels), out = library(), torch.get_num_threads(), images.shape, slopes.shape[3]
    assert kernels is not None
    shape = (math.prod(kernel), channels, out)
    by_samples = math.prod(shape) * images.element_size() <= PRIVATE_BYTES
    totals = scratch.take("totals", (threads if by_samples else 1, *shape), images)
    geometry = _Geometry(
        samples, channels, out, Pair(height, width), Pair(*slopes.shape[1:3]),
        Pair(*kernel), Pair(*stride), Pair(*padding), Pair(*dilation), threads, by_samples,
    )  # fmt: skip
    run = getattr(kernels, f"squares_{KINDS[images.dtype]}_{vector_bits()}")
    run(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (images, slopes)), ctypes.byref(geometry), ctypes.c_void_p(totals.data_ptr()))
    return totals[0]
