"""Training steps on CUDA, captured once as a graph and replayed: launching a small network's kernels takes longer than running them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.modes import Generators

Step = Callable[[Tensor], Tensor]  # rows of the data -> the loss, the weights updated

WARM = 3  # eager steps before the first capture: libraries choose their kernels, the optimizer makes its state


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    rows: Tensor  # what the graph reads
    loss: Tensor  # what it writes


class Replays:
    """Calls a step, or replays it, one graph a number of rows.

    What cannot be captured (a model that looks at values) stays eager, and so does what draws random numbers on the CPU: a graph would
    repeat the first ones for ever.
    """

    def __init__(self, step: Step, before_capture: Callable[[], None]) -> None:
        self.step, self.before_capture = step, before_capture
        self._seen: Counter[int] = Counter()
        self._captured: dict[int, _Captured] = {}
        self._capturable = True

    def __call__(self, rows: Tensor) -> Tensor:
        size = len(rows)
        if self._capturable and size not in self._captured and self._seen[size] and self._seen.total() >= WARM:
            self._capture(rows)
        held = self._captured.get(size)
        if held is None:
            self._seen[size] += 1
            with fastest_kernels():
                return self.step(rows)
        held.rows.copy_(rows)
        held.graph.replay()
        return held.loss

    def _capture(self, rows: Tensor) -> None:
        held, graph, generators = rows.clone(), torch.cuda.CUDAGraph(), Generators.now()
        self.before_capture()
        gc.collect()  # what is freed during a capture (an older graph, say) breaks it
        torch.cuda.current_stream().synchronize()
        try:
            # Only this thread's mistakes break a capture: others may be at work on the same device.
            with fastest_kernels(), torch.cuda.graph(graph, stream=_own_stream(), capture_error_mode="thread_local"):
                loss = self.step(held)
        except Exception:
            torch.cuda.synchronize()
            self._capturable = False
        else:
            self._capturable = generators.same_as(Generators.now())
        if self._capturable:
            self._captured[len(rows)] = _Captured(graph, held, loss)
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
