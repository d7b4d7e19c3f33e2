"""Run a step as a CUDA graph, captured once: launching a small network's kernels one by one takes longer than running them."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from expunge.runtime.modes import Generators
from expunge.runtime.nested import Batch, map_tensors, tensors

Result = TypeVar("Result")  # tensors that the next step of the same form writes over

GRAPHS = 16  # of one step: each keeps the memory of a pass, so where the forms are many the others stay eager
PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, Enum)  # what cannot change from call to call
WARM = 3  # eager steps before the first capture: libraries choose their kernels, the optimizer makes its state


@dataclass(frozen=True)
class _Captured(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # what the graph reads
    result: Result  # what it writes


class GraphedStep(Generic[Result]):
    """Calls a step eagerly at first, then as a CUDA graph: one graph for every form of batch (a tensor is one too).

    What cannot be captured (a model whose control flow depends on values) stays eager, and so does what draws random numbers on the CPU:
    a graph would repeat the first ones for ever. `warm`: the number of eager steps before the first capture. `lasting`: there will be
    thousands of steps, which is worth a search for the fastest kernels.
    """

    def __init__(
        self, step: Callable[..., Result], before_capture: Callable[[], None] = lambda: None, warm: int = WARM, lasting: bool = True
    ) -> None:
        self.step, self.before_capture, self.warm = step, before_capture, warm
        self._kernels: Callable[[], AbstractContextManager[None]] = fastest_kernels if lasting else nullcontext
        self._capturing = torch.cuda.graph if lasting else _captured_at_once
        self._seen: Counter[object] = Counter()
        self._captured: dict[object, _Captured[Result]] = {}
        self.capturable = True

    def __call__(self, batch: Batch, *aside: Any) -> Result:
        """What is given `aside` a graph could not take: with it the step is eager."""
        with _current(tensors(batch)[0].device):
            return self._run(batch, aside)

    def skip_eager(self, batch: Batch) -> None:
        """Capture the next batch of this form at once: what such steps need was loaded by others before."""
        self._seen[form_of(batch)] += self.warm

    def _run(self, batch: Batch, aside: tuple[Any, ...]) -> Result:
        form = form_of(batch)
        known = form is not None and self._seen[form] and self._seen.total() >= self.warm
        if self.capturable and known and not aside and form not in self._captured and len(self._captured) < GRAPHS:
            self._capture(form, batch)
        captured = None if aside else self._captured.get(form)
        if captured is None:
            self._seen[form] += 1
            with self._kernels():
                return self.step(batch, *aside)
        for static, tensor in zip(tensors(captured.batch), tensors(batch), strict=True):
            static.copy_(tensor)
        captured.graph.replay()
        return captured.result

    def _capture(self, form: object, batch: Batch) -> None:
        static, graph, generators = map_tensors(batch, torch.clone), torch.cuda.CUDAGraph(), Generators.now()
        renew_generator = _generator_as_now()
        self.before_capture()
        torch.cuda.current_stream().synchronize()
        try:
            # Only this thread's mistakes break a capture: others may be at work on the same device.
            with self._kernels(), uncollected(), self._capturing(graph, stream=_own_stream(), capture_error_mode="thread_local"):
                result = self.step(static)
        except Exception as error:
            torch.cuda.synchronize()
            self.capturable = False
            renew_generator()
            _clear_frames(error)
        else:
            self.capturable = generators.same_as(Generators.now())
        if self.capturable:
            self._captured[form] = _Captured(graph, static, result)
        else:
            generators.restore()


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the functions that failed held: with torch 2.11 errors of CUDA were kept for ever, and with them the captured pass,
    whose nodes then took part, with a warning, in every backward pass."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _generator_as_now() -> Callable[[], object]:
    """A function that gives the device's generator the state of now: after a capture that failed it raises whenever something is drawn
    ("Offset increment outside graph capture"), since torch has left it in the capture."""
    if not torch.cuda.default_generators:
        return lambda: None
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return partial(generator.graphsafe_set_state, generator.clone_state())


@contextmanager
def _captured_at_once(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None, capture_error_mode: str) -> Iterator[None]:
    """As torch.cuda.graph, which first gives back all memory that is kept for later: to take it again costs as much as a pass of a small
    network. So only where the capture, which needs what the eager steps took, might lack it."""
    if torch.cuda.mem_get_info()[0] < 2 * torch.cuda.memory_reserved():
        torch.cuda.empty_cache()
    with torch.cuda.stream(_side_stream(torch.cuda.current_device()) if stream is None else stream):
        graph.capture_begin(capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps memory for every stream that it has worked on."""
    return torch.cuda.Stream(device)


@contextmanager
def fastest_kernels() -> Iterator[None]:
    """cuDNN times its convolutions for a new shape and keeps the fastest: worth it where the same shapes come thousands of times."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch off garbage collection: what it frees (an older graph, say) breaks a capture. To collect before would take a tenth of a
    second and more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def form_of(batch: Batch) -> Hashable | None:
    """What a graph depends on: the shapes and types of the tensors, and plain values as they are. None where the batch holds anything else,
    which may change meanwhile."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.stride()
    if isinstance(batch, (Mapping, tuple, list)):
        parts = [*batch.items()] if isinstance(batch, Mapping) else batch
        forms = [form_of(part) for part in parts]
        return None if None in forms else tuple(forms)
    return (type(batch), batch) if isinstance(batch, PLAIN) else None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """The device of the batch as the current one: of another a graph would record nothing."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def _own_stream() -> torch.cuda.Stream | None:
    """The current stream where it can be captured; the default one cannot."""
    current = torch.cuda.current_stream()
    return None if current == torch.cuda.default_stream() else current
