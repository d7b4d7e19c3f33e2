"""Say what a training's losses and callbacks hold between epochs, so that it can be kept with the weights and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


def _none() -> None:
    return None


def _ignore(value: Any) -> None:
    return None


@dataclass(frozen=True)
class Carried:
    """`get()` reads, as plain JSON, what losses and callbacks hold after an epoch beside the weights; `put(value)` sets it again.

    For a method with a loss of its own, `run.train(..., state=Carried(get, put))`: with it `training.kept` goes on in the middle of the
    training. `Carried()` says that nothing is held. `of_losses` False: that it does not speak for the losses, but for other callbacks.
    """

    get: Callable[[], Any] = _none
    put: Callable[[Any], None] = _ignore
    of_losses: bool = True

    @classmethod
    def generator(cls, generator: torch.Generator) -> Carried:
        """The state of a generator on the CPU."""

        def put(text: str) -> None:
            generator.set_state(torch.tensor([*bytes.fromhex(text)], dtype=torch.uint8))

        return cls(lambda: bytes(generator.get_state().tolist()).hex(), put)

    @classmethod
    def listed(cls, values: list[float]) -> Carried:
        """A list of numbers."""

        def put(before: list[float]) -> None:
            values[:] = before

        return cls(lambda: [*values], put)

    @classmethod
    def together(cls, **parts: Carried) -> Carried:
        """All parts by name; it speaks for the losses where one of them does."""

        def put(values: Any) -> None:
            for name, part in parts.items():
                part.put(values[name])

        return cls(lambda: {name: part.get() for name, part in parts.items()}, put, any(part.of_losses for part in parts.values()))


def holds_nothing(function: Any) -> bool:
    """Whether a function is known to hold nothing between two calls: none at all, or one of expunge's, which say what they hold."""
    while isinstance(function, partial):
        function = function.func
    return function is None or str(getattr(function, "__module__", "")).startswith("expunge.")
