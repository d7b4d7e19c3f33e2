"""Call the kernels of squares.c where it was built (hatch_build.py) and the processor has its instructions."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from expunge.fisher.closed_forms.scratch import Scratch

LIBRARY = Path(__file__).parent / "squares.shared"  # not .so, which would be taken for a Python module
PRIVATE_BYTES = 1 << 20  # of a weight, up to which each thread takes samples and has a total of its own
SAMPLES = 256  # that are added up one after the other in the type of the gradients
KINDS = {torch.float32: "float", torch.float64: "double"}

Pair = ctypes.c_int64 * 2


class _Geometry(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("samples", "channels", "out")),
        *((name, Pair) for name in ("image", "output", "kernel", "stride", "padding", "dilation")),
        *((name, ctypes.c_int64) for name in ("threads", "by_samples")),
        ("ends", ctypes.c_void_p),
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


def takes(like: Tensor) -> bool:
    """Whether there is a kernel for tensors of this type and place."""
    return like.device.type == "cpu" and like.dtype in KINDS and vector_bits() > 0


def squares(
    images: Tensor,
    slopes: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    scratch: Scratch,
    name: str,
) -> Tensor:
    """The running total of Σ_n (dW_n)² as (taps, channels, out), from contiguous (N, H, W, channels) and (N, H', W', out)."""
    settings = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    pairs = {field: Pair(*value) for field, value in {"image": images.shape[1:3], "output": slopes.shape[1:3], **settings}.items()}
    geometry = _Geometry(channels=images.shape[3], **pairs)

    def add(some: range, total: Tensor) -> None:
        _add(images[some.start : some.stop], slopes[some.start : some.stop], geometry, len(some), scratch, total)

    return _total(add, len(images), math.prod(kernel), images.shape[3], slopes, scratch, name)


def products(a: Tensor, g: Tensor, counts: Sequence[int], scratch: Scratch, name: str) -> Tensor:
    """The running total of Σ_n (a_nᵀ g_n)² as (I, O) for samples of `counts` rows each, end to end in contiguous (R, I) and (R, O)."""
    ends = torch.tensor([0, *itertools.accumulate(counts)], device="cpu")  # whatever the default device is
    geometry = _Geometry(channels=a.shape[1], kernel=Pair(1, 1))

    def add(some: range, total: Tensor) -> None:
        geometry.ends = ends[some.start :].data_ptr()
        _add(a, g, geometry, len(some), scratch, total)

    return _total(add, len(counts), 1, a.shape[1], g, scratch, name)[0]


def _total(
    add: Callable[[range, Tensor], None], samples: int, taps: int, channels: int, slopes: Tensor, scratch: Scratch, name: str
) -> Tensor:
    """The total to which `SAMPLES` samples at a time are added one after the other, later ones in memory of their own: less rounding."""
    out, lanes = slopes.shape[-1], vector_bits() // 8 // slopes.element_size()
    shape = (taps, channels, -(-out // lanes) * lanes)
    fresh, total = not scratch.has_begun(name), scratch.total(name, shape, slopes)
    for start in range(0, samples, SAMPLES):
        some = range(start, min(start + SAMPLES, samples))
        if fresh:
            add(some, total)
        else:
            part = scratch.take("part", shape, slopes).zero_()
            add(some, part)
            total += part
        fresh = False
    return total[..., :out]


def _add(images: Tensor, slopes: Tensor, geometry: _Geometry, samples: int, scratch: Scratch, total: Tensor) -> None:
    """Add these samples to the total; the geometry lacks what follows from these."""
    kernels, out = library(), total.shape[-1]
    assert kernels is not None
    if slopes.shape[-1] != out:  # whole vectors of them
        padded = scratch.take("slopes", (*slopes.shape[:-1], out), slopes)
        padded[..., slopes.shape[-1] :] = 0
        padded[..., : slopes.shape[-1]] = slopes
        slopes = padded
    threads, by_samples = torch.get_num_threads(), total.nbytes <= PRIVATE_BYTES
    others = scratch.take("totals", (threads - 1, *total.shape), total) if by_samples else total
    geometry.samples, geometry.out, geometry.threads, geometry.by_samples = samples, out, threads, by_samples
    run = getattr(kernels, f"squares_{KINDS[total.dtype]}_{vector_bits()}")
    given = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (images, slopes))
    run(*given, ctypes.byref(geometry), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (total, others)))


def scaled(inputs: Tensor, gradient: Tensor, mean: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward through scale·(x − μ) + β, on contiguous (N, ..., channels): g·scale, and by sample and channel Σ g and Σ g·(x − μ) over the
    positions."""
    kernels, (samples, channels) = library(), (inputs.shape[0], inputs.shape[-1])
    assert kernels is not None
    back, (plain, centred) = torch.empty_like(gradient), gradient.new_empty(2, samples, channels)
    mean = gradient.new_zeros(channels) if mean is None else mean.to(gradient.dtype).contiguous()
    scale = scale.to(gradient.dtype).contiguous()  # a weight may be a slice of something
    sizes = (samples, math.prod(inputs.shape[1:-1]), channels, torch.get_num_threads())
    run = getattr(kernels, f"scaled_{KINDS[gradient.dtype]}_{vector_bits()}")
    given, made = (
        [ctypes.c_void_p(tensor.data_ptr()) for tensor in some] for some in ((inputs, gradient, mean, scale), (back, plain, centred))
    )
    run(*given, *map(ctypes.c_int64, sizes), *made)
    return back, plain, centred
