"""Infer which rows of a layer's output belong to which sample, from two batch sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the samples are in an output: along `dimension`, each with `frames` entries there.

    `frames` > 1: the dimension holds samples × frames; sample by sample when `outer`, frame by frame when not. The number may differ
    from batch to batch, as lengths do.
    `frames` == 0: the output has no sample dimension (a position table): it is broadcast over the batch.
    `others`: where they are in the outputs of the parameter's other uses, in their order.
    `derived`: the parameter is used through tensors made of parameters alone; these are where the rows of the data they meet are.
    """

    dimension: int = 0
    frames: int = 1
    outer: bool = True
    others: tuple[Layout, ...] = ()
    derived: bool = False

    def of_use(self, number: int) -> Layout | None:
        """The layout of one of the uses, by its number; None beyond those that are known."""
        if number == 0:
            return replace(self, others=()) if self.others else self
        return self.others[number - 1] if number <= len(self.others) else None

    def fits(self, output: tuple[int, ...], samples: int) -> bool:
        """Whether an output of this shape can have it: the number of frames may differ, but one is one, since its order is not known."""
        if self.frames == 0:
            return True
        size = output[self.dimension] if self.dimension < len(output) else 0
        return size == samples if self.frames == 1 else size > 0 and size % samples == 0

    def first(self, tensor: Tensor, samples: int) -> Tensor:
        """The same values as (samples · frames, ...), each sample's rows together."""
        moved = tensor.movedim(self.dimension, 0) if self.dimension else tensor
        if self.frames > 1 and not self.outer:
            moved = moved.unflatten(0, (-1, samples)).transpose(0, 1).flatten(0, 1)
        return moved

    def rows(self, tensor: Tensor, samples: int) -> Tensor:
        """The same values as (samples, frames, ...)."""
        return self.first(tensor, samples).unflatten(0, (samples, -1))

    def drawn(self, tensor: Tensor, samples: int, rows: Tensor) -> Tensor:
        """The rows of some samples, (drawn, frames, ...), without a copy of the others; of a single one on the CPU no copy at all."""
        if rows.shape[0] == 1 and rows.device.type == "cpu" and (self.frames == 1 or self.outer):
            frames = tensor.shape[self.dimension] // samples
            row = tensor.narrow(self.dimension, int(rows) * frames, frames)
            return (row.movedim(self.dimension, 0) if self.dimension else row)[None]
        moved = tensor.movedim(self.dimension, 0) if self.dimension else tensor
        if moved.shape[0] == samples:
            return moved.index_select(0, rows)[:, None]
        if self.frames > 1 and not self.outer:
            moved = moved.unflatten(0, (-1, samples)).transpose(0, 1)
        else:
            moved = moved.unflatten(0, (samples, -1))
        return moved.index_select(0, rows)


SINGLE = Layout()  # a row per sample, along the first dimension


def infer(fewer: tuple[int, ...], more: tuple[int, ...], samples: int) -> list[Layout]:
    """The layouts that fit an output of shape `fewer` for `samples` − 1 samples and `more` for `samples`, likely ones first."""
    if len(fewer) != len(more):
        return []
    changed = [index for index, (before, after) in enumerate(zip(fewer, more, strict=True)) if before != after]
    if not changed:
        return [Layout(frames=0)]
    if len(changed) > 1 or more[changed[0]] * (samples - 1) != fewer[changed[0]] * samples or more[changed[0]] % samples:
        return []
    dimension, frames = changed[0], more[changed[0]] // samples
    if frames == 1:
        return [Layout(dimension)]
    return [Layout(dimension, frames), Layout(dimension, frames, outer=False)]
