"""Tables as text: on a terminal (with rich, where it is there), Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from expunge.report.paper_tables import Table, Value, as_printed


def markdown(tables: Sequence[Table]) -> str:
    return "\n\n".join(_markdown(table) for table in tables) + "\n"


def _markdown(table: Table) -> str:
    def said(value: Value) -> str:
        ours = f"**{value.ours}**" if value.best else value.ours
        return ours if value.gap is None else f"{ours} ({value.theirs}; {value.gap:+.1f})"

    lines = ["| | " + " | ".join(_one_line(column.title) for column in table.columns) + " |", "|---" * (1 + len(table.columns)) + "|"]
    for section, label, values in _lines(table):
        lines.append(
            f"| *{section}* |" + " |" * len(table.columns) if values is None else f"| {label} | " + " | ".join(map(said, values)) + " |"
        )
    legend = ["In brackets: the paper's number, and the gap."] if table.compared else []
    return "\n".join([f"### {table.title}", "", *lines, *(["", *map(_item, [*legend, *table.notes])] if legend or table.notes else [])])


def _one_line(title: str) -> str:
    return " ".join(title.split())


def _item(note: str) -> str:
    return f"- {note}"


def latex(tables: Sequence[Table]) -> str:
    return "\n\n".join(_latex(table) for table in tables) + "\n"


def _latex(table: Table) -> str:
    def said(value: Value) -> str:
        if value.mean is None:
            return _escaped(value.text)
        ours = f"{value.mean:.1f}" + (rf" {{\scriptsize$\pm${value.sd:.1f}}}" if value.seeds > 1 else "")
        ours = rf"\textbf{{{value.mean:.1f}}}" + ours.removeprefix(f"{value.mean:.1f}") if value.best else ours
        return ours if value.gap is None or value.paper is None else rf"{ours} ({as_printed(value.paper.value)}; ${value.gap:+.1f}$)"

    width = len(table.columns)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{l{'c' * width}}}", r"\toprule"]
    lines += [" & ".join(["", *(_escaped(_one_line(column.title)) for column in table.columns)]) + r" \\", r"\midrule"]
    for section, label, values in _lines(table):
        if values is None:
            lines.append(rf"\multicolumn{{{width + 1}}}{{l}}{{\emph{{{_escaped(section)}}}}} \\")
        else:
            lines.append(" & ".join([_escaped(label), *map(said, values)]) + r" \\")
    caption = ". ".join([table.title, *(["In brackets the paper's number and the gap"] if table.compared else [])])
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\caption{{{_escaped(caption)}.}}", r"\end{table}"])


def _escaped(text: str) -> str:
    replaced = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "–": "--", "w*": "$w^*$"}
    for character, command in replaced.items():
        text = text.replace(character, command)
    return text


def comma_separated(tables: Sequence[Table]) -> str:
    """One line a number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = (
        "experiment",
        "view",
        "block",
        "section",
        "method",
        "reading",
        "measure",
        "mean",
        "sd",
        "seeds",
        "text",
        "paper",
        "paper_sd",
        "gap",
    )
    writer.writerow((*fields, "best"))
    for table in tables:
        for row in table.rows:
            for column, value in zip(table.columns, row.values, strict=True):
                place = (table.experiment, table.view, table.block, row.section, row.name, row.reading, column.key)
                paper = ("", "") if value.paper is None else value.paper
                numbers = (
                    _exact(value.mean),
                    _exact(None if value.mean is None else value.sd),
                    value.seeds,
                    value.text,
                    *paper,
                    _exact(value.gap),
                )
                writer.writerow((*place, *numbers, int(value.best)))
    return out.getvalue()


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def plain(tables: Sequence[Table]) -> str:
    """Columns of text, for a terminal without rich, and for files."""
    return "\n\n".join(_plain(table) for table in tables) + "\n"


def _plain(table: Table) -> str:
    marked = any(column.better for column in table.columns)

    def said(value: Value) -> str:
        mark = "*" if value.best else " " if marked else ""
        return value.ours + mark + ("" if value.gap is None else f" ({value.theirs}; {value.gap:+.1f})")

    headings = [column.title.split("\n") for column in table.columns]
    height = max(map(len, headings), default=1)
    lines: list[tuple[str, ...]] = [("", *(heading[row] if row < len(heading) else "" for heading in headings)) for row in range(height)]
    for section, label, values in _lines(table):
        lines.append((f"  {section}",) if values is None else (label, *map(said, values)))
    widths = [max(len(line[place]) for line in lines if place < len(line)) for place in range(1 + len(table.columns))]
    body = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    return "\n".join([table.title, *body, *table.notes, _legend(table, "*: the best.")])


def _legend(table: Table, best: str) -> str:
    said = ["Percent, mean ± sd over seeds." if any(column.percent for column in table.columns) else "Mean ± sd over seeds."]
    if any(column.better for column in table.columns):
        said.append(best)
    return " ".join([*said, "In brackets: the paper's number, and the gap to it."] if table.compared else said)


def show(tables: Sequence[Table]) -> None:
    """On the terminal: bold and colours by rich, plain text without it."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as Drawn
        from rich.text import Text
    except ImportError:
        print(plain(tables), end="")
        return

    def said(value: Value) -> Text:
        text = Text(value.ours, style="bold" if value.best else "" if value.mean is not None else "dim")
        if value.gap is not None:
            text.append(f" {value.theirs}", style="dim not bold").append(f" {value.gap:+.1f}", style=f"not bold {_colour(value)}")
        return text

    console = Console()
    for table in tables:
        drawn = Drawn(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, caption=_caption(table), caption_justify="left")
        drawn.add_column("")
        for column in table.columns:
            drawn.add_column(column.title, justify="left" if table.compared else "right")
        for section, label, values in _lines(table):
            if values is None:
                drawn.add_row(Text(section, style="italic"))
            else:
                drawn.add_row(label, *map(said, values))
        console.print(drawn)


def _caption(table: Table) -> str:
    return "\n".join([_legend(table, "Bold: the best.").replace("In brackets", "Behind it"), *table.notes])


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
