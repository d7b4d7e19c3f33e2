"""Format tables as text: for a terminal (with rich where installed), Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from expunge.experiments.paper import AVERAGE
from expunge.report.paper_tables import Table, Value, as_printed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Drawn

LABEL = 32  # columns of a terminal that a row's label may take


def markdown(tables: Sequence[Table]) -> str:
    return "\n\n".join(_markdown(table) for table in tables) + "\n"


def _markdown(table: Table) -> str:
    def written(value: Value) -> str:
        ours = f"**{value.ours}**" if value.best else value.ours
        return f"{ours} ({value.beside})" if value.beside else ours

    lines = ["| | " + " | ".join(_one_line(column.title) for column in table.columns) + " |", "|---" * (1 + len(table.columns)) + "|"]
    for section, label, values in _lines(table):
        lines.append(
            f"| *{section}* |" + " |" * len(table.columns) if values is None else f"| {label} | " + " | ".join(map(written, values)) + " |"
        )
    legend = [_brackets(table)] if table.compared else []
    return "\n".join([f"### {table.title}", "", *lines, *(["", *map(_item, [*legend, *table.notes])] if legend or table.notes else [])])


def _brackets(table: Table) -> str:
    gaps = any(value.gap is not None for row in table.rows for value in row.values)
    return "In brackets: the paper's number, and the gap to it." if gaps else "In brackets: the paper's number."


def _one_line(title: str) -> str:
    return " ".join(title.split())


def _item(note: str) -> str:
    return f"- {note}"


def latex(tables: Sequence[Table]) -> str:
    return "\n\n".join(_latex(table) for table in tables) + "\n"


def _latex(table: Table) -> str:
    def written(value: Value) -> str:
        if value.mean is None:
            return _escaped(value.text)
        ours = f"{value.mean:.1f}" + (rf" {{\scriptsize$\pm${value.sd:.1f}}}" if value.spread else "")
        ours = rf"\textbf{{{value.mean:.1f}}}" + ours.removeprefix(f"{value.mean:.1f}") if value.best else ours
        if value.paper is None:
            return ours
        gap = "" if value.gap is None else rf"; ${value.gap:+.1f}$"
        return f"{ours} ({as_printed(value.paper.value)}{gap})"

    width = len(table.columns)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{l{'c' * width}}}", r"\toprule"]
    lines += [" & ".join(["", *(_escaped(_one_line(column.title)) for column in table.columns)]) + r" \\", r"\midrule"]
    for section, label, values in _lines(table):
        if values is None:
            lines.append(rf"\multicolumn{{{width + 1}}}{{l}}{{\emph{{{_escaped(section)}}}}} \\")
        else:
            lines.append(" & ".join([_escaped(label), *map(written, values)]) + r" \\")
    caption = ". ".join([table.title, *([_brackets(table).removesuffix(".")] if table.compared else [])])
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\caption{{{_escaped(caption)}.}}", r"\end{table}"])


def _escaped(text: str) -> str:
    replaced = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "–": "--", "w*": "$w^*$"}
    for character, command in replaced.items():
        text = text.replace(character, command)
    return text


def comma_separated(tables: Sequence[Table]) -> str:
    """One line per number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow("experiment view block section method reading measure mean sd seeds text paper paper_sd gap best".split())
    for table in tables:
        for row in table.rows:
            for column, value in zip(table.columns, row.values, strict=True):
                reading = ", ".join(filter(None, (row.reading, row.setting)))
                place = (table.experiment, table.view, table.block, table.section or row.section, row.name, reading, column.key)
                ours = (_exact(value.mean), _exact(None if value.mean is None else value.sd), value.seeds, value.text)
                writer.writerow((*place, *ours, *(value.paper or ("", "")), _exact(value.gap), int(value.best)))
    return out.getvalue()


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def plain(tables: Sequence[Table]) -> str:
    """Columns of text, for a terminal without rich, and for files."""
    return "\n\n".join(_plain(table) for table in tables) + "\n"


def _plain(table: Table) -> str:
    marked = any(column.better for column in table.columns)

    def written(value: Value) -> str:
        mark = "*" if value.best else " " if marked else ""
        return value.ours + mark + (f" ({value.beside})" if value.beside else "")

    headings = [column.title.split("\n") for column in table.columns]
    height = max(map(len, headings), default=1)
    lines: list[tuple[str, ...]] = [("", *(heading[row] if row < len(heading) else "" for heading in headings)) for row in range(height)]
    for section, label, values in _lines(table):
        lines.append((f"  {section}",) if values is None else (label, *map(written, values)))
    widths = [max(len(line[place]) for line in lines if place < len(line)) for place in range(1 + len(table.columns))]
    body = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    return "\n".join([table.title, *body, *table.notes, _legend(table, "*: the best.")])


def _legend(table: Table, best: str) -> str:
    several = max((value.seeds for row in table.rows for value in row.values), default=0) != 1
    percent = any(column.percent for column in table.columns)
    sentences = [("Percent, mean ± sd over seeds." if percent else "Mean ± sd over seeds.") if several else "Percent; one seed."]
    if table.block == AVERAGE:
        sentences = ["Percent."] if percent else []
    if any(column.better for column in table.columns):
        sentences.append(best)
    return " ".join([*sentences, _brackets(table)] if table.compared else sentences)


def show(tables: Sequence[Table]) -> None:
    """Print on the terminal: bold and colours by rich, plain text without it.

    As wide as the terminal: where a table is wider, the paper's numbers go below ours, and columns into a second part.
    """
    try:
        import rich.console
    except ImportError:
        print(plain(tables), end="")
        return
    console = rich.console.Console()
    for table in tables:
        console.print(table.title, style="italic", markup=False, highlight=False)
        for part in _parts(table, console):
            console.print(part)
        legend = _legend(table, "Bold: the best.").replace("In brackets", "Behind or below it")
        console.print("\n".join([legend, *table.notes, ""]), style="dim", markup=False, highlight=False)


def _parts(table: Table, console: Console) -> list[Drawn]:
    """The table in one piece if it fits, else in as many as its columns need."""
    from rich.measure import Measurement

    def fits(places: Sequence[int], stacked: bool = False) -> bool:
        wide = console.options.update(max_width=10_000)
        return Measurement.get(console, wide, _drawn(table, places, stacked)).maximum <= console.width

    every = list(range(len(table.columns)))
    parts: list[list[int]] = [every if fits(every) else []]
    for place in () if parts[0] else every:
        if parts[-1] and not fits([*parts[-1], place], stacked=True):
            parts.append([])
        parts[-1].append(place)
    return [_drawn(table, part, stacked=not fits(part)) for part in parts]


def _drawn(table: Table, places: Sequence[int], stacked: bool) -> Drawn:
    """Some columns of a table. A long label is folded, a number never."""
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    def number(value: Value) -> Text:
        text = Text(value.ours, style="bold" if value.best else "" if value.mean is not None else "dim")
        if value.beside:
            text.append("\n" if stacked else " ").append(value.theirs, style="dim not bold")
        if value.gap is not None:
            text.append(f" {value.gap:+.1f}", style=f"not bold {_colour(value)}")
        return text

    drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("", overflow="fold", max_width=LABEL)
    for place in places:
        drawn.add_column(table.columns[place].title, justify="left" if table.compared else "right", no_wrap=True)
    for section, label, values in _lines(table):
        if values is None:
            drawn.add_row(Text(section, style="italic"))
        else:
            drawn.add_row(Text(label), *(number(values[place]) for place in places))
    return drawn


def _colour(value: Value) -> str:
    """Green: as near as the two spreads are wide, or a point; red: five points away or more."""
    gap = abs(value.gap or 0.0)
    near = max(1.0, value.sd + (0.0 if value.paper is None else value.paper.sd))
    return "green" if gap <= near else "red" if gap >= 5 else "yellow"


def _lines(table: Table) -> list[tuple[str, str, Sequence[Value] | None]]:
    """The rows, with a line of its own (values None) where a section begins."""
    lines: list[tuple[str, str, Sequence[Value] | None]] = []
    before = ""
    for row in table.rows:
        if row.section != before:
            lines.append((row.section, "", None))
            before = row.section
        lines.append((row.section, row.label, row.values))
    return lines


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {"text": plain, "markdown": markdown, "latex": latex, "csv": comma_separated}
