"""Flip and crop whole batches of images at random, on the device they are on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from expunge.errors import InputError


class Draws(NamedTuple):
    """What was drawn for each image of a batch: where its crop begins in the padded image, and whether it is mirrored."""

    down: Tensor
    right: Tensor
    mirrored: Tensor


@dataclass(frozen=True)
class Augmentation:
    """Pad by `padding` pixels of 0, crop the old size anywhere, mirror every second image (He et al. 2016, arXiv:1512.03385, section 4.2).

    Best on the bytes, before they are normalised: there 0 is black. Nothing waits for the device and shapes are fixed, so `apply` can be
    captured in a CUDA graph, with `draw` into the same tensors before every launch; `draw` too, without a generator of one's own.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise InputError("padding", "must be at least 0", self.padding)

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.apply(images, self.draw(len(images), images.device, generator))

    def draw(self, count: int, device: torch.device, generator: torch.Generator | None = None) -> Draws:
        """Draw for `count` images, by a generator of this device, else by torch's own for it."""
        places = 2 * self.padding + 1
        down, right = torch.randint(0, places, (2, count), generator=generator, device=device)
        mirrored = torch.randint(0, 2 if self.flip else 1, (count,), generator=generator, device=device)
        return Draws(down, right, mirrored.bool())

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Images (N, C, H, W) of any type, cropped and mirrored as drawn; a new tensor."""
        count, _, height, width = images.shape
        padded = functional.pad(images, (self.padding,) * 4)
        rows = draws.down.view(-1, 1) + torch.arange(height, device=images.device)
        along = torch.arange(width, device=images.device)
        columns = draws.right.view(-1, 1) + torch.where(draws.mirrored.view(-1, 1), width - 1 - along, along)
        image = torch.arange(count, device=images.device).view(-1, 1, 1)
        # Indices around a slice put the channels last.
        return padded[image, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2).contiguous()
