"""On CUDA, batches of one shape: captured once as a graph, since launching kernels from Python takes longer than running them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expunge.batches import each_tensor, tensors
from expunge.fisher.passes import Pass
from expunge.objective import Batch

Run = Callable[[Batch, Tensor], Pass]
EAGER = 1  # passes of a shape before it is captured: a capture costs about as much as one, and needs warm libraries


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # the tensors the graph reads
    noise: Tensor
    found: Pass  # the tensors it writes


class Graphs:
    """Calls a pass, or replays it. Whatever cannot be captured (a model that looks at its own values) goes on as it was."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._seen: dict[object, int] = {}
        self._captured: dict[object, _Captured] = {}
        self._capturable = True

    def __call__(self, batch: Batch, noise: Tensor) -> Pass:
        key = tuple((tuple(tensor.shape), tensor.dtype, tensor.stride()) for tensor in tensors(batch))
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._capturable and key not in self._captured and self._seen[key] > EAGER:
            self._capture(key, batch, noise)
        if key not in self._captured:
            return self.run(batch, noise)
        held = self._captured[key]
        for kept, tensor in zip(tensors(held.batch), tensors(batch), strict=True):
            kept.copy_(tensor, non_blocking=True)
        held.noise.copy_(noise)
        held.graph.replay()
        return held.found

    def _capture(self, key: object, batch: Batch, noise: Tensor) -> None:
        batch = each_tensor(batch, torch.clone)
        noise = noise.to(tensors(batch)[0].device)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # what is freed during a capture (an older graph, say) breaks it
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                found = self.run(batch, noise)
        except Exception:
            self._capturable = False
            torch.cuda.synchronize()
            return
        if found.unexpected:
            self._capturable = False
            return
        self._captured[key] = _Captured(graph, batch, noise, found)
