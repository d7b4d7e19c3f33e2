"""Draw small SVG pictures: a plane with axes, marks, lines and bars. Colours are variables of the page's style and follow its theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

FORMS = {  # around the origin, about 10 wide
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "square": "M-4-4h8v8h-8z",
    "diamond": "M0-5.6L5.6 0L0 5.6L-5.6 0z",
    "up": "M0-5.2L5 4H-5z",
    "down": "M0 5.2L5-4H-5z",
    "left": "M-5.2 0L4-5V5z",
    "right": "M5.2 0L-4 5V-5z",
    "plus": "M-1.7-5h3.4v3.3H5v3.4H1.7V5h-3.4V1.7H-5v-3.4h3.3z",
    "cross": "M-4.7-2.4L-2.4-4.7L0-2.3L2.4-4.7L4.7-2.4L2.3 0L4.7 2.4L2.4 4.7L0 2.3L-2.4 4.7L-4.7 2.4L-2.3 0z",
    "spark": "M0-6L1.8-1.8L6 0L1.8 1.8L0 6L-1.8 1.8L-6 0L-1.8-1.8z",
    "star": "M0-6L1.5-2.1L5.7-1.9L2.5.8L3.5 4.9L0 2.6L-3.5 4.9L-2.5.8L-5.7-1.9L-1.5-2.1z",
    "hourglass": "M-4.5-5H4.5L-4.5 5H4.5z",
    "bow": "M-5-4.5V4.5L5-4.5V4.5z",
    "dome": "M-5 2.6a5 5 0 0 1 10 0z",
    "house": "M0-5.5L5-.5V4.5H-5V-.5z",
    "dash": "M-5.6-2h11.2v4h-11.2z",
    "pillar": "M-2-5.6h4v11.2h-4z",
    "hexagon": "M-5.2 0L-2.6-4.5H2.6L5.2 0L2.6 4.5H-2.6z",
    "tee": "M-5-5H5V-1.6H1.7V5H-1.7V-1.6H-5z",
}
COLOURS = 7
FONT = 13
Filling = Literal["full", "open", "dotted"]


@dataclass(frozen=True)
class Mark:
    """A colour of the page's style, a form, and how it is filled."""

    colour: int
    form: str
    filling: Filling = "full"


def tag(name: str, *children: str, **attributes: object) -> str:
    """One element; every value is escaped, children are elements already. `class_` is class, and _ in a name is -."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"' for key, value in attributes.items() if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def _text(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def symbol(mark: Mark) -> str:
    """A mark by itself, for a legend or a row of a table; its meaning is the text beside it."""
    return tag("svg", _form(0, 0, mark, ""), viewBox="-8 -8 16 16", width=16, height=16, aria_hidden="true")


def stroke(kind: str) -> str:
    """A piece of a line by itself, for a legend."""
    return tag("svg", tag("path", d="M0 8H34", class_=f"line {kind}".strip()), viewBox="0 0 34 16", width=34, height=16, aria_hidden="true")


def bar(share: float, mark: Mark) -> str:
    """A horizontal bar, `share` of its box filled, for beside the number in a table."""
    filled = tag("rect", width=100.0 * min(max(share, 0.0), 1.0), height=10, class_=f"k{mark.colour} fill")
    return tag("svg", filled, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def _form(x: float, y: float, mark: Mark, tip: str) -> str:
    hint = (tag("title", escape(tip)),) if tip else ()
    kind = f"k{mark.colour} {'mark' if mark.filling == 'full' else 'hollow'}"
    where = f"translate({x:.1f} {y:.1f})"
    drawn = tag("path", *hint, d=FORMS[mark.form], class_=kind, transform=where)
    return drawn + tag("circle", r=1.4, class_=f"k{mark.colour} fill", transform=where) * (mark.filling == "dotted")


class Plane:
    """Axes from `x[0]` to `x[1]` and `y[0]` to `y[1]`; later drawings are on top. `x_ticks`: where, or what is written where."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        labels: tuple[str, str] = ("", ""),
        size: tuple[int, int] = (460, 320),
        x_ticks: Sequence[float] | Mapping[float, str] | None = None,
    ) -> None:
        self.x, self.y, self.size = x, y, size
        self.left, self.right, self.top = 42 + 18 * bool(labels[1]), 14, 10
        self.bottom = 26 + 20 * bool(labels[0])
        self.drawn: list[str] = []
        self._axes(labels, x_ticks)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the picture."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        width, height = self.size[0] - self.left - self.right, self.size[1] - self.top - self.bottom
        return self.left + across * width, self.top + (1 - up) * height

    def holds(self, x: float, y: float) -> bool:
        return self.x[0] <= x <= self.x[1] and self.y[0] <= y <= self.y[1]

    def _axes(self, labels: tuple[str, str], x_ticks: Sequence[float] | Mapping[float, str] | None) -> None:
        (left, bottom), (right, top) = self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[1])
        room = max(2, int((right - left) // 60)), max(2, int((bottom - top) // 40))
        across = ticks(*self.x, room[0]) if x_ticks is None else x_ticks
        for value, text in (across if isinstance(across, Mapping) else {value: f"{value:g}" for value in across}).items():
            place = self.at(value, self.y[0])[0]
            self.drawn.append(tag("line", x1=place, x2=place, y1=top, y2=bottom, class_="grid"))
            self.drawn.append(tag("text", escape(text), x=place, y=bottom + 17, text_anchor="middle"))
        for value in ticks(*self.y, room[1]):
            place = self.at(self.x[0], value)[1]
            self.drawn.append(tag("line", x1=left, x2=right, y1=place, y2=place, class_="grid"))
            self.drawn.append(tag("text", f"{value:g}", x=left - 6, y=place + 4.5, text_anchor="end"))
        self.drawn.append(tag("path", d=f"M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}", class_="axis"))
        if labels[0]:
            self.drawn.append(
                tag("text", escape(labels[0]), x=(left + right) / 2, y=self.size[1] - 5, text_anchor="middle", class_="label")
            )
        if labels[1]:
            turn = f"translate(15 {(top + bottom) / 2:.1f}) rotate(-90)"
            self.drawn.append(tag("text", escape(labels[1]), transform=turn, text_anchor="middle", class_="label"))

    def mark(self, x: float, y: float, mark: Mark, tip: str = "", shift: float = 0.0, letter: str = "") -> None:
        """A mark at a point, or `shift` to its right, and a letter beside it."""
        across, up = self.at(x, y)
        self.drawn.append(_form(across + shift, up, mark, tip))
        if letter:
            self.drawn.append(tag("text", escape(letter), x=across + shift + 6, y=up + 3.5, class_="letter"))

    def line(self, points: Iterable[tuple[float, float]], mark: Mark, kind: str = "") -> None:
        """Through the points; `kind` is any of "dashed", "thin", "level"."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        self.drawn.append(tag("polyline", points=path, class_=f"k{mark.colour} line {kind}".strip()))

    def level(self, y: float) -> None:
        """A line across: a value to compare with."""
        height = self.at(self.x[0], y)[1]
        self.drawn.append(tag("line", x1=self.left, x2=self.size[0] - self.right, y1=height, y2=height, class_="level"))

    def cross(self, x: float, y: float, label: str) -> None:
        """Lines through a point from edge to edge, with its name."""
        across, up = self.at(x, y)
        right, bottom = self.size[0] - self.right, self.size[1] - self.bottom
        self.drawn.append(tag("path", d=f"M{self.left} {up:.1f}H{right}M{across:.1f} {self.top}V{bottom}", class_="level"))
        anchor, shift = ("end", -7) if across > (self.left + right) / 2 else ("start", 7)
        where = {"x": across + shift, "y": bottom - 7, "text_anchor": anchor, "class_": "label"}
        self.drawn.append(tag("text", escape(label), **where))

    def column(self, x: float, y: float, width: float, mark: Mark, tip: str = "") -> None:
        """A bar from the bottom up to `y`, `width` wide around `x`."""
        (left, top), (right, bottom) = self.at(x - width / 2, y), self.at(x + width / 2, self.y[0])
        hint = (tag("title", escape(tip)),) if tip else ()
        kind = f"k{mark.colour} fill"
        self.drawn.append(tag("rect", *hint, x=left, y=top, width=right - left, height=max(bottom - top, 0.0), class_=kind))

    def picture(self, name: str, title: str, description: str) -> str:
        """The SVG element; `name` is its id on the page, title and description are read aloud."""
        words = tag("title", escape(title), id=f"{name}-title") + tag("desc", escape(description), id=f"{name}-desc")
        box = f"0 0 {self.size[0]} {self.size[1]}"
        return tag(
            "svg",
            words,
            *self.drawn,
            role="img",
            viewBox=box,
            aria_labelledby=f"{name}-title",
            aria_describedby=f"{name}-desc",
            class_="plane",
            font_size=FONT,
        )
