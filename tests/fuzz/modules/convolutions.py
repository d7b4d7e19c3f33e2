"""Draw convolutions and poolings that change the size of an image: odd strides, dilations, groups, paddings and padding modes."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Pair = tuple[int, int]
LARGEST = 9  # side of an image: transposed convolutions make them larger
MODES = ("zeros", "zeros", "zeros", "reflect", "circular", "replicate")


@dataclass(frozen=True)
class Geometry:
    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: Pair

    def after(self, side: Pair) -> Pair:
        return self._along(side, 0), self._along(side, 1)

    def after_transposed(self, side: Pair) -> Pair:
        """Without padding."""
        return tuple((side[axis] - 1) * self.stride[axis] + self._reach(axis) for axis in (0, 1))  # type: ignore[return-value]

    def _reach(self, axis: int) -> int:
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def _along(self, side: Pair, axis: int) -> int:
        return (side[axis] + 2 * self.padding[axis] - self._reach(axis)) // self.stride[axis] + 1


def resizing(random: Random, width: int, side: Pair, label: str) -> tuple[str, str, Pair]:
    """A convolution or pooling from an image of this size: its lines in `__init__` and `forward`, and the size after it."""
    while True:
        padding = random.randint(0, min(2, side[0] - 1)), random.randint(0, min(2, side[1] - 1))  # circular ones go once around at most
        geometry = Geometry(_pair(random, 4), _pair(random, 3), _pair(random, 2), padding)
        kernel, stride, dilation = geometry.kernel, geometry.stride, geometry.dilation
        kind, groups = random.choice(("module", "module", "function", "pool", "transposed")), random.choice((1, 1, 2, width))
        after = geometry.after_transposed(side) if kind == "transposed" else geometry.after(side)
        if kind == "pool" and (dilation != (1, 1) or any(2 * pad > size for pad, size in zip(padding, kernel, strict=True))):
            continue
        if 1 <= min(after) and max(after) <= LARGEST:
            break
    called = f"x = self.{label}(x)"
    if kind == "pool":
        return "", f"x = F.{random.choice(('max_pool2d', 'avg_pool2d'))}(x, {kernel}, {stride}, {padding})", after
    if kind == "transposed":
        settings = f"{kernel}, {stride}, 0, 0, {groups}, {random.choice((True, False))}, {dilation}"
        return f"self.{label} = nn.ConvTranspose2d({width}, {width}, {settings})", called, after
    if kind == "function":
        made = f"self.{label} = nn.Parameter(torch.randn({width}, {width // groups}, {kernel[0]}, {kernel[1]}) / 2)"
        return made, f"x = F.conv2d(x, self.{label}, None, {stride}, {padding}, {dilation}, {groups})", after
    settings = f"{kernel}, {stride}, {padding}, {dilation}, {groups}, {random.choice((True, False))}, '{random.choice(MODES)}'"
    return f"self.{label} = nn.Conv2d({width}, {width}, {settings})", called, after


def _pair(random: Random, most: int) -> Pair:
    return random.randint(1, most), random.randint(1, most)
