"""Run the command line: one file per command, which parses, calls and prints."""

from expunge.cli.commands import main

__all__ = ["main"]
