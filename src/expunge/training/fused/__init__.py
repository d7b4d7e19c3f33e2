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
DEVICES = ("cuda",)
CHANNELS = 4096  # of a norm at most
ENTRIES = 2**30  # of images at most
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
    """[1x1(x), 3x3(1x1(x)), 3x3(3x3(1x1(x))), 1x1(maxpool(x))] of as many different units"""

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
    if takes(x) and _takes_norm(norm, x, x.shape[1]) and (added is None or (added.shape == x.shape and added.dtype == x.dtype)):
        from expunge.training.fused import norms

        return norms.relu_of_norm(norm, x, added)
    return functional.relu(norm(x) if added is None else added + norm(x))


def relu_of_normed(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """relu(norm(conv(x))), without adding the convolution's bias, which the norm takes away again; its gradient is zero."""
    if not (takes(x) and _keeps_size(conv) and conv.bias is not None and _takes_norm(norm, x, conv.out_channels)):
        return relu_of_norm(norm, conv(x))
    from expunge.training.fused import norms

    return norms.relu_of_norm(norm, conv._conv_forward(x, conv.weight, None), None, conv.bias)


def max_pool(x: Tensor, stride: int) -> Tensor:
    """The largest of 3x3 positions, one beyond each edge."""
    if takes(x):
        from expunge.training.fused import pooling

        return pooling.max_pool(x, stride)
    return functional.max_pool2d(x, 3, stride=stride, padding=1)


def halved(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """avg_pool2d(conv(x), 2) of a 1x1 convolution: one of 2x2 of which every tap is a quarter."""
    if takes(x) and _keeps_size(conv, 1):
        return functional.conv2d(x, conv.weight.expand(-1, -1, 2, 2) / 4, conv.bias, stride=2)
    return functional.avg_pool2d(conv(x), 2)


def takes_dense(layers: Sequence[Layer], x: Tensor) -> bool:
    """Whether `dense_block` does what these layers do."""
    if not layers or not _takes_block(x):
        return False
    inner, growth, wide = layers[0].conv1.out_channels, layers[0].conv2.out_channels, x.shape[1]
    for layer in layers:
        if not (_keeps_size(layer.conv1, 1, wide, inner, biased=False) and _keeps_size(layer.conv2, 3, inner, growth, biased=False)):
            return False
        if not (_takes_norm(layer.norm1, x, wide) and _takes_norm(layer.norm2, x, inner)):
            return False
        wide += growth
    return True


def dense_block(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """These layers one after the other, where `takes_dense`."""
    from expunge.training.fused import dense

    return dense.block(layers, x)


def takes_inception(branches: Branches, x: Tensor) -> bool:
    """Whether `inception_unit` does what these branches do."""
    if not _takes_block(x) or len({id(part) for unit in branches.units for part in unit}) < 2 * len(branches.units):
        return False
    for path in ((branches.one,), branches.three, branches.five, (branches.pooled,)):
        wide = x.shape[1]
        for number, unit in enumerate(path):
            if not _keeps_size(unit.conv, 3 if number else 1, wide, unit.width) or not _takes_norm(unit.norm, x, unit.width):
                return False
            wide = unit.width
    return True


def inception_unit(branches: Branches, x: Tensor) -> Tensor:
    """The branches side by side, where `takes_inception`."""
    from expunge.training.fused import inception

    return inception.unit(branches, x)


def takes(x: Tensor) -> bool:
    """Whether the kernels may run on these images."""
    if torch.compiler.is_compiling() or not _inside.get() or x.device.type not in DEVICES or x.dtype not in DTYPES:
        return False
    if x.dim() != 4 or not x.shape[1] < x.numel() <= ENTRIES or not torch.is_grad_enabled() or _saved_elsewhere():
        return False
    return _works(x.device)


def is_plain(module: object, kind: type[nn.Module]) -> bool:
    """Of this very class, and without hooks, which the kernels would not call: pruning and weight norms compute weights in them."""
    if type(module) is not kind or "forward" in vars(module):
        return False
    return not any(getattr(module, f"_{when}_hooks") for when in HOOKS)


def _takes_block(x: Tensor) -> bool:
    """Whether a block gives images of the type of its own."""
    return takes(x) and (not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") == x.dtype)


def _takes_norm(norm: nn.BatchNorm2d, x: Tensor, channels: int) -> bool:
    """Whether this is a norm of so many channels in train mode."""
    if not is_plain(norm, nn.BatchNorm2d) or not norm.training or norm.momentum is None or norm.num_batches_tracked is None:
        return False
    return norm.num_features == channels <= CHANNELS and all(
        tensor is not None and tensor.shape == (channels,) and tensor.is_contiguous() and tensor.device == x.device
        and tensor.dtype in (torch.float32, x.dtype)
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )  # fmt: skip


def _keeps_size(
    conv: nn.Module, kernel: int | None = None, inputs: int | None = None, outputs: int | None = None, biased: bool = True
) -> bool:
    """Whether it is a plain convolution whose outputs are as large as its inputs; with this kernel and these channels, where given."""
    if not isinstance(conv, nn.Conv2d) or not is_plain(conv, nn.Conv2d) or conv.padding_mode != "zeros":
        return False
    padding = tuple(size // 2 for size in conv.kernel_size)
    odd = all(size % 2 for size in conv.kernel_size)
    found = conv.kernel_size, conv.in_channels, conv.out_channels
    wanted = (kernel, kernel) if kernel else found[0], inputs or found[1], outputs or found[2]
    there = (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), padding, (1, 1), 1)
    return odd and there and found == wanted and (biased or conv.bias is None)


def _saved_elsewhere() -> bool:
    """Whether hooks take what is saved for the backward pass: a checkpoint's repeats the forward pass, in a thread without `fused()`."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(True) is not None


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
