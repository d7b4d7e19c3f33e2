"""Show a result in a few lines: as text in a terminal, as a table in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]  # the first row heads the columns, the first column names the rows

NAME = 40  # characters of a name that are shown


def text_table(title: str, rows: Rows) -> str:
    """A title, and columns under it: names to the left, numbers to the right."""
    cut = [[shortened(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(cut[0]))] if cut else []
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in cut
    ]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def html_table(title: str, rows: Rows) -> str:
    """The same for a notebook; names are escaped."""
    cells = [
        "".join(f"<{tag}>{escape(shortened(cell))}</{tag}>" for tag, cell in zip(["th", *["td"] * len(row)], row, strict=False))
        for row in rows
    ]
    return f"<table><caption>{escape(title)}</caption>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def shortened(name: str, width: int = NAME) -> str:
    """On one line, in printable characters."""
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"


def counted(number: int, one: str, several: str = "") -> str:
    """A number and its noun: 1 epoch, 1,234 epochs."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def first_rows(rows: Rows, limit: int = 8) -> list[Sequence[str]]:
    """A table's header and its first rows, and how many more there are."""
    shown = list(rows[: limit + 1])
    if len(rows) > limit + 1:
        shown.append([f"and {len(rows) - limit - 1:,} more", *[""] * (len(rows[0]) - 1)])
    return shown
