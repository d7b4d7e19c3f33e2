"""The command line: one file per command; parse, call, print."""

from expunge.cli.commands import main

__all__ = ["main"]
