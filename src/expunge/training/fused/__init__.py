"""Steps of training in fewer kernels, for our networks on CUDA: norm and ReLU in one, max pools, dense blocks, inception units.

PyTorch's own kernels for these take most of a training step of DenseNet and GoogLeNet. Inside `fused()`, which the training loop enters
around steps that become CUDA graphs, the functions here run our Triton kernels where they can. Everywhere else they are the plain
operations, with their hooks and derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANNELS = 4096  # of a norm at most
HOOKS = ("forward_pre", "forward", "backward_pre", "backward")
_inside: ContextVar[bool] = ContextVar("fused", default=False)


class Layer(NamedTuple):
    """[x, conv2(relu(norm2(conv1(relu(norm1(x))))))]: conv1 with a kernel of 1x1, conv2 of 3x3, both without bias."""

    norm1: nn.BatchNorm2d
    conv1: nn.Conv2d
    norm2: nn.BatchNorm2d
    conv2: nn.Conv2d

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.norm1.weight, self.norm1.bias, self.conv1.weight, self.norm2.weight, self.norm2.bias, self.conv2.weight


class Unit(NamedTuple):
    """relu(norm(conv(x))), the image's size kept."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d

    @property
    def width(self) -> int:
        return self.conv.out_channels

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.conv.weight, self.conv.bias, self.norm.weight, self.norm.bias


class Branches(NamedTuple):
    """[1x1(x), 3x3(1x1(x)), 3x3(3x3(1x1(x))), 1x1(maxpool(x))]"""

    one: Unit
    three: tuple[Unit, Unit]
    five: tuple[Unit, Unit, Unit]
    pooled: Unit

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.one, *self.three, *self.five, self.pooled


@contextmanager
def fused(wanted: bool = True) -> Iterator[None]:
    token = _inside.set(wanted)
    try:
        yield
    finally:
        _inside.reset(token)


def relu_of_norm(norm: nn.BatchNorm2d, x: Tensor, added: Tensor | None = None) -> Tensor:
    """relu(norm(x)), or relu(added + norm(x))"""
    if _takes_norm(norm, x) and (added is None or (added.shape == x.shape and added.dtype == x.dtype)):
        from expunge.training.fused import norms

        return norms.relu_of_norm(norm, x, added)
    return functional.relu(norm(x) if added is None else added + norm(x))


def relu_of_normed(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """relu(norm(conv(x))), without adding the convolution's bias, which the norm takes away again; its gradient is zero."""
    if conv.bias is None or not _is_plain(conv, nn.Conv2d) or not _takes_norm(norm, x):
        return relu_of_norm(norm, conv(x))
    from expunge.training.fused import norms

    return norms.relu_of_norm(norm, conv._conv_forward(x, conv.weight, None), None, conv.bias)


def max_pool(x: Tensor, stride: int) -> Tensor:
    """The largest of 3x3 positions, one beyond each edge."""
    if _takes(x):
        from expunge.training.fused import pooling

        return pooling.max_pool(x, stride)
    return functional.max_pool2d(x, 3, stride=stride, padding=1)


def halved(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """avg_pool2d(conv(x), 2) of a 1x1 convolution: one of 2x2 of which every tap is a quarter."""
    if _takes(x):
        return functional.conv2d(x, conv.weight.expand(-1, -1, 2, 2) / 4, conv.bias, stride=2)
    return functional.avg_pool2d(conv(x), 2)


def takes_all(block: nn.Module, x: Tensor, biased: bool) -> bool:
    """Whether a block can be one operation: of its norms and convolutions none was changed, these have a bias only if `biased`."""
    return _takes(x) and all(
        _takes_norm(part, x) if isinstance(part, nn.BatchNorm2d) else _keeps_size(part) and (biased or part.bias is None)
        for part in block.modules()
        if not any(part.children())
    )


def dense_block(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """These layers one after the other, where `takes_all`."""
    from expunge.training.fused import dense

    return dense.block(layers, x)


def inception_unit(branches: Branches, x: Tensor) -> Tensor:
    """The branches side by side, where `takes_all`."""
    from expunge.training.fused import inception

    return inception.unit(branches, x)


def _takes_norm(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    kept = norm.affine and norm.track_running_stats and norm.momentum is not None
    return _is_plain(norm, nn.BatchNorm2d) and norm.training and kept and _takes(x) and x.numel() > norm.num_features <= CHANNELS


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Of this very class, and without hooks, which the kernels would not call: pruning and weight norms compute weights in them."""
    return type(module) is kind and not any(getattr(module, f"_{when}_hooks") for when in HOOKS)


def _keeps_size(conv: nn.Module) -> bool:
    """Whether it is a plain convolution whose outputs are as large as its inputs."""
    if not isinstance(conv, nn.Conv2d) or not _is_plain(conv, nn.Conv2d) or conv.padding_mode != "zeros":
        return False
    padding = tuple(size // 2 for size in conv.kernel_size)
    return (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), padding, (1, 1), 1)


def _takes(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or not _inside.get() or not x.is_cuda or x.dtype not in DTYPES:
        return False
    return x.dim() == 4 and x.numel() < 2**31 and torch.is_grad_enabled() and _works(x.device)


@cache
def _works(device: torch.device) -> bool:
    """Whether the kernels compile on this device and give the right numbers, tried once on a small case."""
    try:
        from expunge.training.fused import norms

        norm, x = nn.BatchNorm2d(2).to(device), torch.tensor([-1.0, 1.0], device=device).view(2, 1, 1, 1).expand(2, 2, 1, 1)
        with torch.no_grad():
            return bool((norms.relu_of_norm(norm, x, None).sum() - 2).abs() < 1e-4)
    except Exception:  # no Triton, no C compiler for its launcher, a GPU that it does not know
        return False
