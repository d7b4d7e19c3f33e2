"""Tables on a terminal: as wide as it is, every number whole."""

import os
import pty
import re
import struct
import sys
from dataclasses import replace

import pytest

from expunge.experiments.plans import EXPERIMENTS
from expunge.report.formats import show
from expunge.report.paper_tables import tables
from tests.report.cases import made, paper_tables

SHOWN = "from expunge.report.formats import show; from tests.report.cases import paper_tables; show(paper_tables())"


def on_a_terminal(columns: int) -> list[str]:
    """What the tables are on a pseudo-terminal of so many columns, without colours."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
        os.execve(sys.executable, [sys.executable, "-c", SHOWN], {**environment, "TERM": "xterm-256color"})
    written = b""
    try:
        while piece := os.read(terminal, 1 << 16):
            written += piece
    except OSError:
        pass  # on Linux a terminal whose other end is closed cannot be read
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, written.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).splitlines()


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal_and_no_number_is_cut(columns):
    lines, shown = on_a_terminal(columns), paper_tables()
    assert max(map(len, lines)) <= columns and "…" not in "".join(lines)
    written = "\n".join(lines)
    assert all(value.ours in written and value.theirs in written for table in shown for row in table.rows for value in row.values)
    label = next(place for place, line in enumerate(lines) if line.split()[:1] == ["FisherMask"])
    remain = next(row.values for row in shown[0].rows if row.label == "FisherMask")[0]
    assert remain.ours in lines[label] and remain.theirs in lines[label + (columns == 80)]  # below it, or behind


def test_a_long_label_is_folded(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    table = tables(EXPERIMENTS["table1"], *made("table1"))[1]
    name = "research.unlearning.methods.of.my.own.and.more:Forgetful"
    show([replace(table, rows=tuple(replace(row, label=name) for row in table.rows))])
    written = capsys.readouterr().out
    assert max(map(len, written.splitlines())) <= 80 and "82.0 ±1.0" in written
    assert name[:32] in written and name[32:] in written


def test_titles_and_notes_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    table = tables(EXPERIMENTS["table1"], *made("table1"))[1]
    show([replace(table, title="[bold]one[/bold]", notes=("[/red]",))])
    written = capsys.readouterr().out
    assert "[bold]one[/bold]" in written and "[/red]" in written
