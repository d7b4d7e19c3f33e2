"""Draw convolutions and poolings that change the size of an image: odd strides, dilations, groups, paddings and padding modes."""

from __future__ import annotations

from random import Random

Side = tuple[int, int]


def shrinking_convolution(random: Random, width: int, side: Side, label: str) -> tuple[str, str, Side]:
    """Its lines in `__init__` and `forward`, and the size after it."""
    while True:
        kernel, stride, dilation, padding = (_pair(random, low, high) for low, high in ((1, 4), (1, 3), (1, 2), (0, 2)))
        reach = [step * (size - 1) + 1 for step, size in zip(dilation, kernel, strict=True)]
        mode = random.choice(("zeros", "zeros", "zeros", "reflect", "circular", "replicate"))
        padding = tuple(min(pad, whole - 1) for pad, whole in zip(padding, side, strict=True))  # type: ignore[assignment]
        after = tuple((size + 2 * pad - span) // step + 1 for size, pad, span, step in zip(side, padding, reach, stride, strict=True))
        if min(after) >= 1:
            break
    kind = random.choice(("module", "module", "function", "pool", "transposed"))
    groups = random.choice((1, 1, 2, width))
    if kind == "pool":
        pooling, padding = random.choice(("max_pool2d", "avg_pool2d")), (min(padding[0], kernel[0] // 2), min(padding[1], kernel[1] // 2))
        after = tuple((size + 2 * pad - span) // step + 1 for size, pad, span, step in zip(side, padding, kernel, stride, strict=True))
        if min(after) < 1:
            return "", "x = x * 1.0", side
        return "", f"x = F.{pooling}(x, {kernel}, {stride}, {padding})", (after[0], after[1])
    if kind == "transposed":
        made = f"self.{label} = nn.ConvTranspose2d({width}, {width}, {kernel}, {stride}, 0, 0, {groups}, True, {dilation})"
        after = tuple((size - 1) * step + span for size, step, span in zip(side, stride, reach, strict=True))
        if max(after) <= 9:
            return made, f"x = self.{label}(x)", (after[0], after[1])
        kind, after = "module", side
        kernel, stride, dilation, padding = (1, 1), (1, 1), (1, 1), (0, 0)
    if kind == "function":
        made = f"self.{label} = nn.Parameter(torch.randn({width}, {width // groups}, {kernel[0]}, {kernel[1]}) / 2)"
        return made, f"x = F.conv2d(x, self.{label}, None, {stride}, {padding}, {dilation}, {groups})", (after[0], after[1])
    settings = f"{kernel}, {stride}, {padding}, {dilation}, {groups}, {random.choice((True, False))}, '{mode}'"
    return f"self.{label} = nn.Conv2d({width}, {width}, {settings})", f"x = self.{label}(x)", (after[0], after[1])


def _pair(random: Random, low: int, high: int) -> Side:
    return random.randint(low, high), random.randint(low, high)
