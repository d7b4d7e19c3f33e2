"""Copy a model so that the copy shares nothing with it and can be trained, in whatever state the original is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from expunge.errors import ExpungeError, ModelError
from expunge.runtime.nested import tensors
from expunge.storage.sharded import is_sharded


def copied(model: nn.Module) -> nn.Module:
    """A deep copy outside inference mode. Activations that modules keep, which have a graph, are copied without it."""
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    # TorchScript would copy parameters as results of a computation.
    with torch.inference_mode(False), torch.no_grad() if scripted else nullcontext():
        kept = [tensor for module in model.modules() for tensor in tensors([vars(module), module._buffers])]
        memo = {id(tensor): tensor.detach().clone() for tensor in kept if tensor.grad_fn is not None}
        try:
            copy_of = copy.deepcopy(model, memo)
        except (RuntimeError, TypeError) as error:
            raise ModelError(f"model: must be something copy.deepcopy can copy; found: {str(error).splitlines()[0]}") from error
    if scripted:
        for value, original in zip(copy_of.parameters(), model.parameters(), strict=True):
            value.requires_grad_(original.requires_grad)
    return copy_of


@contextmanager
def put_back_on_error(model: nn.Module) -> Iterator[None]:
    """Where an ExpungeError ends the context, parameters and buffers have again the values that they had before. Copies are on the CPU."""
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_inference()}
    kept = {number: _on_cpu(tensor) for number, tensor in values.items()}
    try:
        yield
    except ExpungeError:
        for place, named in buffers:
            for name, tensor in named.items():  # one by one: a TorchScript module's buffers are no dictionary
                place[name] = tensor
        with torch.no_grad():
            for number, tensor in values.items():
                tensor.copy_(kept[number])
        raise


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if is_sharded(tensor) else tensor.detach().to("cpu", copy=True)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch's DistributedDataParallel, as accelerate prepares models too: the same weights under their own names.

    Also where that was compiled: its forward pass would wait for other processes, which are at other samples.
    """
    compiled = getattr(model, "_orig_mod", None)
    wrapper = compiled if isinstance(compiled, nn.parallel.DistributedDataParallel) else model
    return wrapper.module if isinstance(wrapper, nn.parallel.DistributedDataParallel) else model
