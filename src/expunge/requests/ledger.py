"""Keep an append-only ledger of requests: JSON lines, each with the digest of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expunge.errors import InputError
from expunge.requests.canonical import canonical, digest
from expunge.storage.codec import Count, decode, encode
from expunge.storage.documents import excerpt, parse_json

START = "0" * 64  # in place of the digest of a line before the first
LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """A request in the ledger: how many samples it adds, the root of their commitments, the weights it led to, its receipt."""

    number: Count
    time: str
    samples: Count
    commitments: str
    weights_before: str
    weights_after: str
    receipt: str  # SHA-256 of the receipt's file
    previous: str  # SHA-256 of the line before

    def line(self) -> bytes:
        return canonical(encode(self))


def written(entries: Sequence[Entry]) -> bytes:
    return b"".join(entry.line() for entry in entries)


def head(entries: Sequence[Entry]) -> str:
    """The digest of the last line: noted elsewhere, it shows whether the ledger was rewritten."""
    return digest(entries[-1].line()) if entries else START


def read_ledger(content: bytes, argument: str = LEDGER) -> tuple[Entry, ...]:
    """The entries of a ledger; raises InputError, which names the line, where the chain is broken or a line is in another form."""
    entries: list[Entry] = []
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            entry = decode(Entry, parse_json(line), "the line")
        except (ValueError, TypeError) as error:
            raise InputError(argument, f"line {number} must be an entry of a ledger ({excerpt(error)})") from error
        if entry.line() != line:
            raise InputError(argument, f"line {number} must be in canonical form, as it was written")
        if (entry.number, entry.previous) != (number, head(entries)):
            raise InputError(argument, f"line {number} must follow line {number - 1}: the chain is broken")
        if entries and entry.weights_before != entries[0].weights_before:
            raise InputError(argument, f"line {number} must begin with the same weights as the others")
        entries.append(entry)
    return tuple(entries)
