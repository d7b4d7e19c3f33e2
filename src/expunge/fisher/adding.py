"""Add up squares in float64 across batches: float32 sums would drift after some 10⁵ additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expunge.data.objective import Objective
from expunge.errors import ModelError
from expunge.fisher.reading import Labels
from expunge.fisher.samples import Squares


class _Joined(NamedTuple):
    """The sums of all parameters of a GPU in one memory, so that a batch is added by three kernels, not by one for each parameter."""

    form: Sequence[tuple[object, ...]]
    memory: Tensor


class Sums(dict[str, Tensor]):
    """A float64 total for every parameter, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: _Joined | None = None

    def add(self, squares: Squares) -> None:
        form = [(name, square.shape, square.stride(), square.dtype, square.device) for name, square in squares.items()]
        if self._joined is not None and self._joined.form == form:
            self._joined.memory.add_(_end_to_end(squares))
            return
        if not self and _can_be_joined(squares):
            memory = _end_to_end(squares).to(torch.float64)
            places = memory.split([square.numel() for square in squares.values()])
            self._joined = _Joined(form, memory)
            for (name, square), place in zip(squares.items(), places, strict=True):
                self[name] = place.as_strided(square.shape, square.stride())
            return
        for name, square in squares.items():
            if name in self:
                self[name].add_(square)
            else:
                # In the memory order the squares come in (a convolution's may be permuted), so that adding runs along memory.
                self[name] = square.detach().to(torch.float64, memory_format=torch.preserve_format, copy=True)

    def clear(self) -> None:
        super().clear()
        self._joined = None

    def not_finite(self) -> list[str]:
        """The names of those that are not; the device is waited for once."""
        if self._joined is not None and self._joined.memory.numel() == sum(total.numel() for total in self.values()):
            if torch.isfinite(self._joined.memory).all():
                return []
        flags = torch.stack([torch.isfinite(total).all() for total in self.values()]).tolist() if self else []
        return [name for name, finite in zip(self, flags, strict=True) if not finite]


def _end_to_end(squares: Squares) -> Tensor:
    return torch.cat([square.detach().as_strided((square.numel(),), (1,)) for square in squares.values()])


def _can_be_joined(squares: Squares) -> bool:
    """On one GPU, in one type, and each without gaps."""
    kinds = {(square.device, square.dtype) for square in squares.values()}
    return len(kinds) == 1 and next(iter(kinds))[0].type in JOINED_ON and all(map(_is_dense, squares.values()))


JOINED_ON = ("cuda",)


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


class Totals:
    """The sums of a call and the number of its samples; `Batchwise` and `Samplewise` add to them (adders.py)."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self.sums = Sums()
        self.count = 0
        self.labels: Labels | None = None  # of the batch that comes

    def commit(self, squares: Squares, count: int) -> None:
        self.sums.add(squares)
        self.count += count

    def finish(self) -> None:
        """The data have ended."""

    def restart(self, names: set[str]) -> None:
        """Begin again, with another plan for these parameters."""
        self.sums.clear()
        self.count = 0

    def totals(self) -> dict[str, Tensor]:
        for name in self.sums.not_finite():
            raise ModelError(
                f"the squared gradients of {name} must be finite; found NaN or infinity: the loss is not finite, or they are beyond "
                f"the range of {str(self.parameters[name].dtype).removeprefix('torch.')}"
            )
        none = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.parameters.items() if name not in self.sums}
        # Squares formed by pairs of positions can come out below zero by a rounding error.
        return {name: (none if name in none else self.sums)[name].clamp_min_(0).contiguous() for name in self.parameters}
