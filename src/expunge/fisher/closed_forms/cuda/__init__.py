"""Run our Triton kernels where Triton is installed (it comes with torch for CUDA) and works; elsewhere there are other ways."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def works(device: torch.device) -> bool:
    """Whether the kernels compile on this device and give the right numbers, tried once on a small case."""
    try:
        images, slopes = torch.ones(2, 1, 4, 16, device=device), torch.ones(2, 1, 4, 16, device=device)
        back, plain, centred = scaled(images, slopes, None, images[0, 0, 0])
        cases = [(squares(images, slopes, (1, 1), (1, 1), (0, 0), (1, 1)), 32.0), (back, 1.0), (plain, 4.0), (centred, 4.0)]
        return all(bool((tensor == expected).all()) for tensor, expected in cases)
    except Exception:  # no Triton, no C compiler for its launcher, a GPU that it does not know
        return False


def takes(tensor: Tensor, tf32: bool, taps: int, positions: int, wide: int, out: int) -> bool:
    """Whether it can do this, and is the fastest; `tf32`: whether the factors of float32 products may be rounded to that type."""
    if tensor.device.type != "cuda" or tensor.dtype not in DTYPES or (tensor.dtype == torch.float32 and not tf32):
        return False
    return faster(taps, positions, wide, out) and works(tensor.device)


def faster(taps: int, positions: int, wide: int, out: int) -> bool:
    """Whether it is, than matmuls of the library that write each sample's product (benchmarks/convolution_ways.py --device cuda --tf32).

    Those have image patches to write first where there is more than one tap. Where there is one they are slower only if a product is
    large for the positions it sums, or too narrow for them. Few channels leave most of a tile empty.
    """
    return wide >= 16 and positions > 2 and (taps > 1 or positions <= 32 or out < 64)


def scales(tensor: Tensor) -> bool:
    """Whether it can do `scaled` on this."""
    return tensor.device.type == "cuda" and tensor.dtype in DTYPES and works(tensor.device)


def scaled(inputs: Tensor, gradient: Tensor, mean: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward through scale·(x − μ) + β, on contiguous (N, ..., channels): g·scale, and by sample and channel Σ g and Σ g·(x − μ) over the
    positions, in float32."""
    from expunge.fisher.closed_forms.cuda.scaling import launch

    with torch.cuda.device(inputs.device) if inputs.is_cuda else nullcontext():
        by_channel = (None if mean is None else mean.contiguous()), scale.contiguous()  # a weight may be a slice of something
        back, plain, centred = launch(inputs.flatten(1, -2), gradient.flatten(1, -2), *by_channel)
    return back.view(gradient.shape), plain, centred


def squares(
    images: Tensor, slopes: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Σ_n (dW_n)² as (taps, channels, out) in float32, from contiguous (N, H, W, channels) and (N, H', W', out)."""
    from expunge.fisher.closed_forms.cuda.products import launch

    with torch.cuda.device(images.device) if images.is_cuda else nullcontext():  # a kernel starts on the current one
        return launch(images, slopes, kernel, stride, padding, dilation)
