"""Write one page that shows a folder of results: tables, figures, and how they were run."""

from expunge.report.page import page, write

__all__ = ["page", "write"]
