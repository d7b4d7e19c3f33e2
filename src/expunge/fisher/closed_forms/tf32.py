"""Read and switch off TF32 for float32 products on CUDA, under the older and the newer names of PyTorch's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    place: Any
    name: str
    off: Any
    on: Any

    @property
    def is_on(self) -> bool:
        return bool(getattr(self.place, self.name) == self.on)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        setattr(self.place, self.name, self.off)
        try:
            yield
        finally:
            setattr(self.place, self.name, self.on)


def _setting(older: Any, newer: str) -> _Setting:
    """The name to read and write it by: PyTorch raises on the older one where the newer has been used."""
    setting = _Setting(older, "allow_tf32", False, True)
    try:
        setting.is_on  # noqa: B018
    except RuntimeError:
        return _Setting(getattr(older, newer) if newer else older, "fp32_precision", "ieee", "tf32")
    return setting


def _matmuls() -> _Setting:
    return _setting(torch.backends.cuda.matmul, "")


def _convolutions() -> _Setting:
    return _setting(torch.backends.cudnn, "conv")


def in_matmuls() -> bool:
    """PyTorch's default: no."""
    return _matmuls().is_on


def in_convolutions() -> bool:
    """PyTorch's default: yes."""
    return _convolutions().is_on


@contextmanager
def switched_off() -> Iterator[None]:
    with ExitStack() as stack:
        for setting in (_matmuls(), _convolutions()):
            stack.enter_context(setting.switched_off())
        yield
