"""The Triton kernel of kernel.py, where Triton is installed (it comes with torch for CUDA) and works; without it there are other ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from expunge.fisher import tf32

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def works(device: torch.device) -> bool:
    """Whether the kernel compiles and is right there, tried once on a small case."""
    try:
        images, slopes = torch.ones(2, 1, 4, 16, device=device), torch.ones(2, 1, 4, 16, device=device)
        return bool((squares(images, slopes, (1, 1), (1, 1), (0, 0), (1, 1)) == 32.0).all())
    except Exception:  # no Triton, no C compiler for its launcher, a GPU that it does not know
        return False


def takes(tensor: Tensor) -> bool:
    """Where products may be computed on tensor cores; in full float32 matmuls of the library are faster."""
    if tensor.device.type != "cuda" or tensor.dtype not in DTYPES:
        return False
    return (tensor.dtype != torch.float32 or tf32.in_matmuls()) and works(tensor.device)


def squares(
    images: Tensor, slopes: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Σ_n (dW_n)² as (taps, channels, out) in float32, from contiguous (N, H, W, channels) and (N, H', W', out).

    Where TF32 is not allowed, each factor is the sum of two of that type, and their products lose nothing visible.
    """
    from expunge.fisher.cuda.kernel import launch

    return launch(images, slopes, kernel, stride, padding, dilation, "tf32" if tf32.in_matmuls() else "tf32x3")
