"""One page that shows a folder of results: tables, figures, and how it was run."""

from expunge.report.page import page, write

__all__ = ["page", "write"]
