"""Tell whether a model in eval mode gives the same output from call to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expunge.data.batches import device_of, take
from expunge.data.objective import Batch, Objective
from expunge.errors import ModelError
from expunge.fisher.comparing import NOISE, UNIT, allowed
from expunge.fisher.confirming import FIRST
from expunge.fisher.planning.definition import COUPLED, NOT_FINITE, random_like, tolerance
from expunge.fisher.samples import fresh, gradients, is_usable, output_error, sizes_of
from expunge.runtime.modes import Generators

CALLS = 8  # with the same batch, where a model draws random numbers or moves its buffers


class Moving(NamedTuple):
    """What a call of a model in eval mode should leave as it is: random numbers, and the buffers, by identity and version."""

    generators: Generators
    on_device: bytes  # the state of the GPU's generator
    buffers: list[tuple[int, int]]

    @classmethod
    def now(cls, places: Sequence[Mapping[str, Tensor | None]], device: torch.device) -> Moving:
        buffers = [(id(buffer), buffer._version) for place in places for buffer in place.values() if buffer is not None]
        drawn = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
        return cls(Generators.now(), drawn, buffers)


class Steadiness:
    """Notes what a model moves as it is called, and looks into it where something moves."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self._steady = False
        self._counters: list[object] | None = _counters(model)  # before the first batch
        self._buffers = [module._buffers for module in model.modules() if module._buffers]
        self._device = device_of(model)

    def now(self) -> Moving:
        return Moving.now(self._buffers, self._device)

    def check(self, batch: Batch, before: Moving) -> None:
        """Raise ModelError where the output changes from call to call; looked into where random numbers were drawn or buffers moved, and
        where the first call changed a plain number of a module's."""
        now, counters, self._counters = self.now(), self._counters, None
        if counters is not None and counters != _counters(self.model):
            self._repeat(take(batch, slice(0, FIRST)))  # a few samples show what changes with a number of calls
        random = not now.generators.same_as(before.generators) or now.on_device != before.on_device
        if not random and (self._steady or now.buffers == before.buffers):
            return
        self._repeat(batch)
        self._steady = True

    def _repeat(self, batch: Batch) -> None:
        """Raise ModelError where several calls with these samples give several outputs."""
        with torch.no_grad():
            first, *others = (self.objective.logits(self.model, fresh(batch)) for _ in range(2 if self._steady else CALLS))
        if not is_usable(first):
            raise ModelError(NOT_FINITE)
        noise = max(NOISE.get(first.dtype, tolerance(first)), allowed(first) / 100 if first.is_cuda else 0.0)  # sums in any order
        if any(not output_error(other, first) < noise for other in others):
            raise ModelError(COUPLED)
        one, two = (self._gradients_of(batch) for _ in range(2))  # which may change where outputs are but signs
        pairs = sizes_of([(value, one[name]) for name, value in two.items()]) if one.keys() == two.keys() else [(1.0, 0.0)]
        unit = UNIT.get(first.dtype, UNIT[torch.float32]) * max((size for _, size in pairs), default=0.0)  # a gradient may be but rounding
        if any(not difference <= max(noise * size, unit) for difference, size in pairs):
            raise ModelError(COUPLED)

    def _gradients_of(self, batch: Batch) -> dict[str, Tensor]:
        with torch.enable_grad():
            logits = self.objective.logits(self.model, fresh(batch))
        found = gradients(logits, self.parameters, random_like(logits)) if logits.requires_grad else {}
        return {name: value for name, value in found.items() if value is not None}


def _counters(model: nn.Module) -> list[object]:
    """The plain numbers that modules hold."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, (int, float))]
