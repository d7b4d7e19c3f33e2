"""Set train or eval mode, random numbers and threads for a while and restore them, also after an exception; choose the device."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import numpy
import torch
from torch import Tensor, nn

from expunge.errors import InputError, ModelError
from expunge.validate import check_seed


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the whole model in train or eval mode; afterwards every module is in its own mode again.

    cuDNN computes gradients of recurrent layers in train mode alone, so on CUDA they stay in it, for eval mode with their dropout set to 0.
    Meanwhile the caller's autocast caches no casts.
    """
    before = [(module, module.training) for module in model.modules()]
    recurrent = [(module, module.dropout) for module, _ in before if _recurrent(module) and _on_cuda(module) and not training]
    try:
        model.train(training)
    except NotImplementedError as error:
        raise ModelError("model: must have train and eval modes; found a module of torch.export, give the one it was made from") from error
    try:
        for layer, _ in recurrent:
            layer.training, layer.dropout = True, 0.0
        with uncached():
            yield
    finally:
        for layer, dropout in recurrent:
            layer.dropout = dropout
        for module, mode in before:
            module.training = mode


@contextmanager
def uncached() -> Iterator[None]:
    """Switch off the cache of the caller's autocast. The next pass would take its casts though a step has changed the weights; in older
    versions of torch a pass that needs a graph would take casts made without one (pytorch#158232)."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()  # the caller's next pass too


@contextmanager
def vmap_unwarned() -> Iterator[None]:
    """Where vmap has a loop for an operation torch tells users of a performance drop, about which they can do nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def _recurrent(module: nn.Module) -> TypeGuard[nn.RNNBase]:
    """One of torch's own: the forward pass of another class may drop more in train mode."""
    return getattr(type(module), "forward", None) in (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)


def _on_cuda(module: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def hooked(model: nn.Module) -> bool:
    """Whether the model has hooks that must be called at every pass, which a CUDA graph does not do.

    Torch's own (pruning, spectral norm) compute with tensors alone, which a CUDA graph does as well.
    """
    places = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for module in model.modules() for place in places for hook in getattr(module, place).values())
    return any(not _of_torch(hook) for hook in hooks)


def _of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.nn.utils.")


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers that a forward pass may change (counters), and embedding tables that it may renormalise."""
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    tables = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm]
    changing = [*(tensor for _, named in buffers for tensor in named.values() if tensor is not None), *tables]
    copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in changing]
    try:
        yield
    finally:
        for place, named in buffers:
            for name, tensor in named.items():  # one by one: a TorchScript module's buffers are no dictionary
                place[name] = tensor
        with torch.no_grad():
            for tensor, version, copy in copies:
                if tensor._version != version:
                    tensor.copy_(copy)


@contextmanager
def safe_norms(model: nn.Module) -> Iterator[None]:
    """On the CPU, put the input of a GroupNorm in planes where it needs no gradient: in channels-last memory torch ends the process."""

    def in_planes(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return (inputs[0].contiguous(), *inputs[1:]) if inputs and not inputs[0].requires_grad else None

    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm) and not _on_cuda(module)]
    handles = [module.register_forward_pre_hook(in_planes) for module in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch (the CPU and the device), numpy and Python; afterwards their generators are as if nothing had been drawn."""
    devices, seed = [device] if device.type == "cuda" else [], int(seed)
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            # Not torch.manual_seed: it would also reseed devices that are not ours to restore.
            torch.default_generator.manual_seed(seed)
            for place in devices:
                with torch.cuda.device(place):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def generator(seed: int, argument: str = "seed") -> torch.Generator:
    """A generator of its own, from a seed that is checked."""
    check_seed(argument, seed)
    return torch.Generator().manual_seed(int(seed))


def check_seeds(argument: str, *seeds: int) -> None:
    """Raise InputError for seeds that torch does not take."""
    for seed in seeds:
        if not -(2**63) <= seed < 2**63:
            raise InputError(argument, "must be in [-2^63, 2^63)", seed)


class Generators(NamedTuple):
    """The states of the CPU's random number generators: torch's, Python's and numpy's."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def same_as(self, other: Generators) -> bool:
        alike = self.python == other.python and torch.equal(self.torch, other.torch)
        return alike and all(numpy.array_equal(*parts) for parts in zip(self.numpy, other.numpy, strict=True))


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models uncompiled: what torch.compile returns does not call hooks registered later."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread: as fast for small networks, the same result on any number of cores, and no waiting on a busy one."""
    with threads(1):
        yield


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch on so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_named(name: str | None) -> torch.device:
    """The device of this name, if it is available; None: the GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        usable = "cpu or cuda" if torch.cuda.is_available() else "cpu; it finds no CUDA device"
        raise InputError("device", f"must be one that torch finds here, such as {usable}", name) from error
    return device
