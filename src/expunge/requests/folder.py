"""Read the folder of a model's requests, and name every byte in it that does not fit."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.requests.canonical import canonical, digest
from expunge.requests.commitments import KEY, Opening
from expunge.requests.ledger import LEDGER, Entry, read_ledger
from expunge.requests.receipt import RECEIPT, Receipt, read_receipt
from expunge.requests.settings import Settings, check_settings
from expunge.requests.weights import file_digest
from expunge.storage.codec import decode, encode
from expunge.storage.documents import excerpt, parse_json, read_json, read_plain
from expunge.storage.files import check_file
from expunge.storage.folders import INSIDE, LITTER, RESULT, listed

COMMAND = "requests"  # in result.json: what made the folder
WEIGHTS, PATCH, EDIT = "weights.safetensors", "patch.safetensors", "edit.safetensors"
SETTINGS, LOG, OPENINGS, SIGNATURE = "settings.json", "log.txt", "openings.json", "receipt.sig"
AUDIT = "audit.json"
UNLISTED = (RECEIPT, LEDGER, SIGNATURE)  # files that a receipt cannot hold the digest of
NEEDED = (WEIGHTS, PATCH, SETTINGS)  # every receipt lists them
NAMES = tuple(encode(Settings()))
LARGEST, LARGEST_OPENINGS = 2**24, 2**31  # bytes of a ledger or receipt, and of ids


@dataclass(frozen=True)
class State:
    """A folder of requests as it is: its receipts, the ledger, the ids with their salts, where these are there, and how it was done: the
    settings, and the method that they built."""

    folder: Path
    receipt: Receipt
    ledger: tuple[Entry, ...]
    openings: tuple[Opening, ...] | None
    settings: Settings
    built: Mapping[str, Any]

    @property
    def ids(self) -> set[int]:
        """All samples forgotten so far."""
        if self.openings is None:
            rule = f"must hold {OPENINGS}, the ids of earlier requests; without it they cannot be forgotten again together with others"
            raise InputError("out", rule, os.fspath(self.folder))
        return {number for opening in self.openings for number in opening.ids}


def earlier_receipt(number: int) -> str:
    return f"receipt-{number}.json"


def earlier_signature(number: int) -> str:
    return f"receipt-{number}.sig"


def check_new_file(out: str | os.PathLike[str]) -> None:
    """Before a file is written: it replaces none, and is not among those of a folder of requests, which would no longer fit."""
    check_file("out", out)
    if os.path.lexists(out):
        raise InputError("out", "must be a new file; move what is there", os.fspath(out))
    if all((Path(out).parent / name).exists() for name in (RECEIPT, LEDGER)):
        raise InputError("out", "must not be in a folder of requests, which holds the files of its receipt alone", os.fspath(out))


def read_state(folder: Path, others: Collection[str] = ()) -> State | None:
    """The requests of a folder; None where there is none yet. Raises InputError where anything in it was changed, or removed.

    `others` may be in the folder too.
    """
    if not any((folder / name).exists() for name in (RECEIPT, LEDGER)) and not listed(folder, COMMAND):
        return None
    for what in misfits(folder, {*INSIDE, *others}):
        raise InputError("out", "must be as `expunge unlearn` left it", what)
    openings = _openings(folder / OPENINGS) if (folder / OPENINGS).exists() else None
    return State(folder, receipt_at(folder / RECEIPT), ledger_at(folder / LEDGER), openings, *settings_at(folder))


def read_openings(folder: Path) -> list[tuple[Entry, Opening]]:
    """The requests of a folder with their ids, whichever other files were deleted since."""
    if not (folder / RECEIPT).is_file():
        raise InputError("folder", "must be a folder of requests", os.fspath(folder))
    if not (folder / OPENINGS).is_file():
        rule = f"must hold {OPENINGS}, the ids, which are not handed on: prove where the request was made"
        raise InputError("folder", rule, os.fspath(folder))
    for what in misfits(folder, INSIDE, alone=True):
        raise InputError("folder", "must be as `expunge unlearn` left it", what)
    return list(zip(ledger_at(folder / LEDGER), _openings(folder / OPENINGS), strict=True))


def settings_at(folder: Path) -> tuple[Settings, Mapping[str, Any]]:
    """The settings of the last request, and the description of the method that they built."""
    content = _settings(folder / SETTINGS)
    return decode(Settings, {name: content[name] for name in NAMES}), content["built"]


def _settings(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        check_settings(decode(Settings, {name: content[name] for name in NAMES}))
        if not isinstance(content["built"]["repr"], str) or not isinstance(content["used"], str):
            raise ValueError("a method must be described in words")
        return dict(content)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(path.name, f"must hold the settings of a request ({excerpt(error)})") from error


def receipt_at(path: Path) -> Receipt:
    return read_receipt(_content(path), path.name)


def ledger_at(path: Path) -> tuple[Entry, ...]:
    return read_ledger(_content(path), path.name)


def _content(path: Path) -> bytes:
    try:
        return read_plain(path, LARGEST)
    except FileNotFoundError as error:
        raise InputError(path.name, "must be in the folder", os.fspath(path)) from error
    except ValueError as error:
        raise InputError(path.name, str(error)) from error


def misfits(folder: Path, others: Collection[str] = (), alone: bool = False) -> Iterator[str]:
    """What does not fit, one line each: between the receipt and the ledger, the ledger and itself, the receipt and every file.

    `others` may be in the folder too; `alone`: files of the receipt may be missing.
    """
    try:
        receipt, ledger = receipt_at(folder / RECEIPT), ledger_at(folder / LEDGER)
    except InputError as error:
        yield str(error)
        return
    if not ledger or receipt.entry() != ledger[-1]:
        yield f"{LEDGER}: its last line is not that of {RECEIPT}"
    for entry in ledger[:-1]:
        name = earlier_receipt(entry.number)
        if name in receipt.files and receipt.files[name] != entry.receipt:
            yield f"{name}: is not the receipt that line {entry.number} of {LEDGER} names"
    for name, expected in sorted(receipt.files.items()):
        path = folder / name
        if Path(name).name != name:  # a forged receipt must not lead elsewhere
            yield f"{excerpt(name)}: is no name of a file"
        elif not path.is_file():
            if name != OPENINGS and not alone:  # is not handed on
                yield f"{name}: is missing"
        elif file_digest(path) != expected:
            yield f"{name}: was changed since the receipt was written"
    yield from _contradictions(folder, receipt, ledger)
    known = {*receipt.files, *UNLISTED, *LITTER, *others}
    yield from (f"{name}: is not a file of the receipt" for name in sorted(os.listdir(folder)) if name not in known)
    yield from _opening_misfits(folder, ledger)


def _contradictions(folder: Path, receipt: Receipt, ledger: tuple[Entry, ...]) -> Iterator[str]:
    """What the receipt says otherwise than the ledger, or than one of the files that it lists and that are as it lists them."""
    says, files = f"{RECEIPT}: says otherwise than", receipt.files
    if receipt.forgotten != (forgotten := sum(entry.samples for entry in ledger)):
        yield f"{says} {LEDGER}: {receipt.forgotten} samples forgotten, and {forgotten} there"
    yield from (f"{name}: is not listed by {RECEIPT}" for name in NEEDED if name not in files)
    for name, known in ((SETTINGS, receipt.settings), (EDIT, receipt.mask)):
        if files.get(name) != known:
            yield f"{says} its list of files: {name}"
    if (folder / SETTINGS).is_file() and file_digest(folder / SETTINGS) == files.get(SETTINGS):
        try:
            settings = _settings(folder / SETTINGS)
        except InputError as error:
            yield str(error)
            return
        own = {"used": receipt.method, "device": receipt.code.device, "threads": receipt.code.threads}
        yield from (f"{says} {SETTINGS}: {name}" for name, value in own.items() if settings[name] != value)
    audit = receipt.measured.get("audit")
    if isinstance(audit, dict) and (folder / AUDIT).is_file() and file_digest(folder / AUDIT) == files.get(AUDIT):
        yield from (f"{says} {AUDIT}: {name}" for name, value in _audited(folder / AUDIT).items() if audit.get(name) != value)


def _audited(path: Path) -> dict[str, Any]:
    """What a receipt has of an audit too."""
    try:
        content = read_json(path)
        return {name: content[name] for name in ("verdict", "retrained") if name in content}
    except (ValueError, TypeError):
        return {}


def _opening_misfits(folder: Path, ledger: tuple[Entry, ...]) -> Iterator[str]:
    if not (folder / OPENINGS).is_file():
        return
    try:
        openings = _openings(folder / OPENINGS)
    except InputError as error:
        yield str(error)
        return
    if [(len(opening.ids), opening.root()) for opening in openings] != [(entry.samples, entry.commitments) for entry in ledger]:
        yield f"{OPENINGS}: is not what {LEDGER} commits to"


def write_openings(openings: Sequence[Opening]) -> bytes:
    """Ids as text, a few bytes each: a list of JSON may not have millions of entries."""
    return canonical([{"key": opening.key, "ids": " ".join(map(str, opening.ids))} for opening in openings])


def _openings(path: Path) -> tuple[Opening, ...]:
    try:
        parts = parse_json(read_plain(path, LARGEST_OPENINGS), LARGEST_OPENINGS)
        openings = tuple(Opening(part["key"], tuple(map(int, part["ids"].split()))) for part in parts)
        if any(len(bytes.fromhex(opening.key)) != KEY for opening in openings):
            raise ValueError(f"a key must have {KEY} bytes")
        return openings
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(path.name, f"must hold ids and keys ({excerpt(error)})") from error


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that a receipt lists."""
    return {name: digest((folder / name).read_bytes()) for name in sorted(os.listdir(folder)) if name not in UNLISTED}


__all__ = ["COMMAND", "EDIT", "LOG", "PATCH", "RESULT", "SETTINGS", "SIGNATURE", "WEIGHTS", "State", "digests", "misfits", "read_state"]
