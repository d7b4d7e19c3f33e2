"""A batch on the CPU in two halves, each on a thread of its own with half of torch's threads.

Small operations gain nothing from a second thread, and large ones wait for the slower one: two halves side by side wait for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from expunge.batches import batch_size, take
from expunge.fisher.passes import Pass
from expunge.fisher.scratch import Scratch
from expunge.objective import Batch

Run = Callable[[nn.Module, Batch, Tensor, Scratch], Pass]

FEWEST = 16  # samples in a half: below it a pass is mostly the interpreter's work, which threads cannot share


def twin(model: nn.Module) -> nn.Module | None:
    """The same parameters and buffers in modules of their own: what a forward pass leaves in `self` must not be shared.

    None where halves will not do: one thread, another device, hooks or modes (which may keep state), a model that cannot be copied.
    """
    held = [*model.parameters(), *model.buffers()]
    if torch.get_num_threads() < 2 or any(tensor.device.type != "cpu" for tensor in held):
        return None
    if hooked(model) or _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():
        return None
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in held})
    except Exception:  # whatever a module holds that cannot be copied
        return None


def hooked(model: nn.Module) -> bool:
    """Somebody's hooks are to be called at every pass."""
    return any(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in model.modules())


class Halves:
    """Runs a pass on two halves of a batch at once and joins what they found."""

    def __init__(self, model: nn.Module, other: nn.Module) -> None:
        self.models, self.scratches = (model, other), (Scratch(), Scratch())
        self.pool = ThreadPoolExecutor(2)
        threads, ready = torch.get_num_threads(), Barrier(3)

        def begin() -> None:
            torch.set_num_threads(threads // 2)
            ready.wait()

        for _ in range(2):
            self.pool.submit(begin)
        ready.wait()
        torch.set_num_threads(threads)  # torch gives the number set last to threads that are yet to come

    def __call__(self, run: Run, batch: Batch, noise: Tensor) -> Pass:
        middle = batch_size(batch) // 2
        parts = [(take(batch, rows), noise[rows]) for rows in (slice(0, middle), slice(middle, None))]
        autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

        def call(model: nn.Module, part: tuple[Batch, Tensor], scratch: Scratch) -> Pass:
            with torch.autocast("cpu", *autocast):  # which a new thread does not inherit
                return run(model, *part, scratch)

        futures = [self.pool.submit(call, *each) for each in zip(self.models, parts, self.scratches, strict=True)]
        try:
            wait(futures)
        finally:
            wait(futures)  # also after Ctrl-C: nothing may be given back to the caller while a half is at work
        return joined([future.result() for future in futures])

    def close(self) -> None:
        self.pool.shutdown()


def joined(passes: Sequence[Pass]) -> Pass:
    first, second = passes
    for name, squares in second.squares.items():
        first.squares[name] = first.squares[name].add_(squares) if name in first.squares else squares
    cotangents = [torch.cat(pair) for pair in zip(first.cotangents, second.cotangents, strict=True)]
    logits = torch.Size([first.logits[0] + second.logits[0], *first.logits[1:]])
    return Pass(first.squares, cotangents, logits, first.unexpected | second.unexpected)
