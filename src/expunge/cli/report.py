"""Run `expunge report`: write one page of a folder of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expunge.cli.bench import Bench
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_file


@dataclass(frozen=True)
class Report:
    """A folder of results, and the page it becomes."""

    results: str
    out: str


def report_command(results: str, /, out: str = "report.html") -> Report:
    """One page of a folder of results: tables, figures, the paper's numbers. It needs no network, and prints.

    Args:
        results: Folder that holds cells/, such as results/smoke.
        out: The page.
    """
    return Report(results, out)


def run_report(options: Report) -> None:
    with uninterrupted():
        from expunge import report

    check_file("out", options.out)
    print(report.write(options.results, options.out))


def run_bench_report(options: Bench) -> None:
    with uninterrupted():
        from expunge import report

    page = str(Path(options.out) / f"{options.profile}.html")
    check_file("out", page)
    print(report.write(str(Path(options.out) / options.profile), page))
