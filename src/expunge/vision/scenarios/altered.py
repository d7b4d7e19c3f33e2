"""Change images and labels of a dataset when a sample is read; nothing is copied before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expunge.data.batches import OnDevice, row_reader
from expunge.data.indices import resolved
from expunge.errors import InputError
from expunge.validate import LARGEST, is_number, is_whole

Corner = Literal["lower right", "lower left", "upper right", "upper left"]


@dataclass(frozen=True)
class Trigger:
    """A square of `size` pixels, `margin` pixels from a corner, set to `value`: one number, or one for each channel."""

    size: int = 4
    corner: Corner = "lower right"
    value: float | tuple[float, ...] = 0.0
    margin: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.size) or not 1 <= self.size <= LARGEST:
            raise InputError("trigger", "must be at least one pixel wide, a whole number", self.size)
        if not is_whole(self.margin) or not 0 <= self.margin <= LARGEST:
            raise InputError("margin", "must be 0 or more pixels, a whole number", self.margin)
        if not all(is_number(value) for value in self._values):
            raise InputError("value", "must be one finite number, or one for each channel", self.value)
        if self.corner not in get_args(Corner):
            raise InputError("corner", f"must be one of {', '.join(get_args(Corner))}", self.corner)

    def check(self, image: Any) -> None:
        """Raise where it does not fit on images like this one."""
        if not isinstance(image, Tensor) or image.dim() != 3:
            form = f"shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise InputError("dataset", "images must be tensors (channels, height, width)", form)
        if self.size + self.margin > min(image.shape[1:]):
            height, width = image.shape[1:]
            raise InputError("trigger", f"must fit into the images, {height} × {width}", f"{self.size} with a margin of {self.margin}")
        if isinstance(self.value, tuple) and len(self.value) != image.shape[0]:
            raise InputError("value", f"must be one number, or one for each of the {image.shape[0]} channels", self.value)
        values = torch.tensor([float(value) for value in self._values], dtype=torch.float64)
        if not image.is_floating_point() and not torch.equal(values.to(image.dtype).double(), values):
            raise InputError("value", f"must be what images of {image.dtype} can hold", self.value)

    @property
    def _values(self) -> tuple[float, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)

    def __call__(self, images: Tensor) -> Tensor:
        """The images (..., channels, height, width) with the square, as a copy."""
        vertical, horizontal = self.corner.split()
        near, far = slice(self.margin, self.margin + self.size), slice(-self.margin - self.size, -self.margin or None)
        stamped = images.clone()
        square = stamped[..., near if vertical == "upper" else far, near if horizontal == "left" else far]
        values = self.value if isinstance(self.value, tuple) else (self.value,) * images.shape[-3]
        for channel, value in enumerate(values):  # filled one by one: a tensor of values would have to be sent to the device
            square[..., channel, :, :] = value
        return stamped


class Altered(Dataset[Any]):
    """A dataset of (image, ..., label) with other labels and, with `change`, changed images.

    `change` must take one image or a batch of them. Batches are read and changed at once (`batches.row_reader`).
    """

    def __init__(self, dataset: Any, targets: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> None:
        dataset = resolved(dataset, "dataset")
        if len(targets) != len(dataset):
            raise InputError("targets", f"must be one label for each of the {len(dataset)} samples", len(targets))
        self.dataset, self.targets, self.change = dataset, targets, change

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, *between, label = self.dataset[index]
        # A label stays what it was, a tensor or a number, so that these samples can be collated with others.
        target = self.targets[index].to(label) if isinstance(label, Tensor) else int(self.targets[index])
        return (image if self.change is None else self.change(image), *between, target)

    def batch_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        image, *between, label = self._read(rows)
        return (image if self.change is None else self.change(image), *between, self._labels.at(rows)[rows].to(label))

    @property
    def alters_samples(self) -> bool:
        """Whether its samples count as different from those of the dataset: changed images do, whatever their label (`overlap`)."""
        return self.change is not None

    @cached_property
    def _read(self) -> Callable[[Tensor], Any]:
        return row_reader(self.dataset)

    @cached_property
    def _labels(self) -> OnDevice:
        return OnDevice(self.targets)

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a loader's worker process: a reader is made of closures, which cannot be sent, and is quickly made again.
        return {name: value for name, value in self.__dict__.items() if name not in ("_read", "_labels")}
