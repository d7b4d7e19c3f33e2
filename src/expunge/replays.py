"""Steps on CUDA, captured once as a graph and replayed: launching a small network's kernels takes longer than running them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from expunge.batches import each_tensor, tensors
from expunge.modes import Generators
from expunge.objective import Batch

Result = TypeVar("Result")  # tensors that the next step of the same form writes over

WARM = 3  # eager steps before the first capture: libraries choose their kernels, the optimizer makes its state


@dataclass(frozen=True)
class _Captured(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # what the graph reads
    result: Result  # what it writes


class Replays(Generic[Result]):
    """Calls a step, or replays it, one graph for every form of batch (a tensor is one too).

    What cannot be captured (a model that looks at values) stays eager, and so does what draws random numbers on the CPU: a graph would
    repeat the first ones for ever.
    """

    def __init__(self, step: Callable[[Batch], Result], before_capture: Callable[[], None] = lambda: None) -> None:
        self.step, self.before_capture = step, before_capture
        self._seen: Counter[object] = Counter()
        self._captured: dict[object, _Captured[Result]] = {}
        self._capturable = True

    def __call__(self, batch: Batch) -> Result:
        form = tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors(batch))
        if self._capturable and form not in self._captured and self._seen[form] and self._seen.total() >= WARM:
            self._capture(form, batch)
        held = self._captured.get(form)
        if held is None:
            self._seen[form] += 1
            with fastest_kernels():
                return self.step(batch)
        for kept, tensor in zip(tensors(held.batch), tensors(batch), strict=True):
            kept.copy_(tensor)
        held.graph.replay()
        return held.result

    def _capture(self, form: object, batch: Batch) -> None:
        held, graph, generators = each_tensor(batch, torch.clone), torch.cuda.CUDAGraph(), Generators.now()
        self.before_capture()
        gc.collect()  # what is freed during a capture (an older graph, say) breaks it
        torch.cuda.current_stream().synchronize()
        try:
            # Only this thread's mistakes break a capture: others may be at work on the same device.
            with fastest_kernels(), torch.cuda.graph(graph, stream=_own_stream(), capture_error_mode="thread_local"):
                result = self.step(held)
        except Exception:
            torch.cuda.synchronize()
            self._capturable = False
        else:
            self._capturable = generators.same_as(Generators.now())
        if self._capturable:
            self._captured[form] = _Captured(graph, held, result)
        else:
            generators.restore()


@contextmanager
def fastest_kernels() -> Iterator[None]:
    """cuDNN times its convolutions for a new shape and keeps the fastest: worth it where the same shapes come thousands of times."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _own_stream() -> torch.cuda.Stream | None:
    """The current stream where it can be captured; the default one cannot."""
    current = torch.cuda.current_stream()
    return None if current == torch.cuda.default_stream() else current
